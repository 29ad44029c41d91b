#!/bin/sh
# Writes the digests that the tags in docker/bases.env have today into that file. Needs docker with buildx.
set -eu
cd "$(dirname "$0")/.."
file="${1:-docker/bases.env}"
fresh="$(mktemp)"
trap 'rm -f "$fresh"' EXIT
cp "$file" "$fresh"
for line in $(grep -v '^#' "$file"); do
  name="${line%%=*}" tag="${line#*=}"
  tag="${tag%@*}"
  digest="$(docker buildx imagetools inspect "$tag" --format '{{.Manifest.Digest}}')"
  case $digest in
    sha256:*) sed -i "s|^$name=.*|$name=$tag@$digest|" "$fresh" ;;
    *) echo "pin: no digest of $tag: $digest" >&2 && exit 1 ;;
  esac
done
cat "$fresh" >"$file"
grep -v '^#' "$file"
