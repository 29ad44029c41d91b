"""An environment as on a machine where nobody has installed a compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "as", "ld")
"""What Inductor, Triton and setuptools look for, and what these need; by name, on PATH."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
"""Where something compiled might lie from before."""


def environment(folder: Path, programs: Iterable[str] = ()) -> dict[str, str]:
    """This process's environment, with a PATH that holds `programs` and `lscpu` only, and empty caches.

    `lscpu`, which every Debian has, tells vLLM which cores there are. Raises FileNotFoundError for a program
    that is not here.
    """
    tools = folder / "bin"
    tools.mkdir(parents=True)
    for name in ("lscpu", *programs):
        found = shutil.which(name)
        if found is None:
            raise FileNotFoundError(name)
        (tools / name).symlink_to(found)
    assert not [name for name in COMPILERS if shutil.which(name, path=str(tools))]
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    return {**kept, "PATH": str(tools)} | {name: str(folder / name.lower()) for name in CACHES}
