#!/usr/bin/env bash
# Generates headrace/v1/*_pb2*.py from proto/. With a folder as argument, generates there instead.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
"${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" \
  --grpc_python_out="$out" proto/headrace/v1/sample.proto proto/headrace/v1/sync.proto
rm -f "$out"/headrace/v1/sample_pb2_grpc.py
