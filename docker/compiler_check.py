"""Fails unless a C and a C++ compiler are there, with Python's headers: a step of the images with CUDA.

Triton compiles a launcher in C for every kernel, and PyTorch's Inductor C++ beside it, when they are first
used: in vLLM always, in the trainer where a model or a loss of the user's own is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

COMPILERS = {"c": os.environ.get("CC", "gcc"), "cpp": os.environ.get("CXX", "g++")}
"""By the ending of the file that it compiles; as Triton and Inductor choose them."""


def problem(kind: str, compiler: str) -> str:
    """What keeps `compiler` from making a Python module; empty when nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"module.{kind}"
        source.write_text("#include <Python.h>\nint main(void) { return Py_IsInitialized(); }\n")
        words = [compiler, "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(source)]
        try:
            done = subprocess.run(
                [*words, "-o", f"{folder}/module.so"], capture_output=True, text=True, timeout=60, check=False
            )
        except FileNotFoundError:
            return "it is not installed"
    return done.stderr.strip() if done.returncode else ""


def main() -> None:
    for kind, compiler in COMPILERS.items():
        if found := problem(kind, compiler):
            sys.exit(
                f"{compiler} does not compile for Python, which Triton and Inductor need: install g++ and "
                f"Python's headers in this image. {found}"
            )
    print(f"compilers: {', '.join(COMPILERS.values())}")


if __name__ == "__main__":
    main()
