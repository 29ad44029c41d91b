#!/bin/sh
# `make test-cluster` on a kind cluster of its own: builds the CPU images, makes the cluster, loads them, tells the story of
# tests/deploy/cluster, and removes the cluster. Needs docker and kind on PATH. KEEP=1 leaves the cluster with everything in it.
set -eu
cd "$(dirname "$0")/.."
cluster="${CLUSTER:-headrace-test}"
tag=0.1.0-cpu
for program in docker kind; do
  command -v "$program" >/dev/null || { echo "test-kind: $program is not installed" >&2; exit 2; }
done
finish() {
  code=$?
  [ "${KEEP:-0}" = 1 ] || kind delete cluster --name "$cluster" >/dev/null 2>&1 || true
  exit "$code"
}
make images DEVICE=cpu REGISTRY=headrace TAG="$tag" PUSH=
kind create cluster --name "$cluster"
trap finish EXIT
for image in queue coordinator trainer rollouter; do
  kind load docker-image --name "$cluster" "headrace/$image:$tag"
done
CONTEXT="kind-$cluster" REGISTRY=headrace TAG="$tag" DEVICE=cpu VALUES='' .venv/bin/python -m tests.deploy.cluster
