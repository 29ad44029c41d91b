#!/bin/sh
# Builds the images of all four services with docker; `make images` gives it what it reads:
# DEVICE (cuda, cpu or all), REGISTRY, TAG, PUSH, BUILD_ARGS and, instead of docker/bases.env's, the bases.
# With DEVICE=all those for CPU have -cpu after the tag, which is the chart's image.variant.
set -eu
cd "$(dirname "$0")/.."

base() { # NAME: the environment's, else that of docker/bases.env
  eval "given=\${$1:-}"
  [ -n "$given" ] || given="$(sed -n "s/^$1=//p" docker/bases.env)"
  echo "--build-arg $1=$given"
}

build() { # DEVICE TAG
  for service in queue coordinator trainer rollouter; do
    args="$(base PYTHON_IMAGE)"
    case $service in trainer | rollouter) args="$args --build-arg DEVICE=$1" ;; esac
    [ $service != rollouter ] || args="$args $(base VLLM_IMAGE)"
    image="$REGISTRY/$service:$2"
    # An SBOM (SPDX: Debian's packages and Python's) and how the image was built lie beside it in the registry.
    # Only what is pushed can have them: docker's own store of images may not hold them.
    if [ -n "${PUSH:-}" ]; then
      how="buildx build --push --sbom=true --provenance=mode=max"
    else
      how=build
    fi
    # Several words each.
    # shellcheck disable=SC2086
    docker $how -f docker/Dockerfile.$service $args ${BUILD_ARGS:-} -t "$image" .
  done
}

case $DEVICE in
  cuda | cpu) build "$DEVICE" "$TAG" ;;
  all)
    build cuda "$TAG"
    build cpu "$TAG-cpu"
    ;;
  *) echo "images: DEVICE=$DEVICE; it is cuda, cpu or all" >&2 && exit 2 ;;
esac
