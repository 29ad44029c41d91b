#!/bin/sh
# Packages the chart for publication, with the place of its images in its values: then nobody has to name it.
#   scripts/package_chart.sh ghcr.io/OWNER FOLDER
# HELM names the program where `helm` is not it. The archive is FOLDER/headrace-VERSION.tgz.
set -eu
cd "$(dirname "$0")/.."
registry="$1" folder="$2"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cp -R helm/headrace "$work/headrace"
values="$work/headrace/values.yaml"
sed -i "/^image:/,/^[^ #]*:\$/s|^  registry: \"\"\$|  registry: \"$registry\"|" "$values"
if ! grep -q "^  registry: \"$registry\"\$" "$values"; then
  echo "package_chart: values.yaml has no empty image.registry to fill" >&2
  exit 1
fi
"${HELM:-helm}" package "$work/headrace" --destination "$folder"
