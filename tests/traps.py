"""A working directory with modules of somebody's that have the names of ours, Python's and PyTorch's."""

from __future__ import annotations

from pathlib import Path

NAMES = ("headrace", "headrace_queue", "headrace_trainer", "queue", "json", "torch", "vllm", "redis")
_SPRUNG = "sprung"


def set_traps(folder: Path) -> Path:
    """Fill `folder`; whoever imports one of them leaves word, and fails."""
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        program = (
            "import os, sys, traceback\n"
            f"with open({str(folder / _SPRUNG)!r}, 'a') as file:\n"
            f"    print('{name} in', sys.argv, os.getpid(), file=file)\n"
            f"raise ImportError('this {name} is the working directory\\'s')\n"
        )
        if name.startswith("headrace"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "__init__.py").write_text(program)
        else:
            (folder / f"{name}.py").write_text(program)
    return folder


def sprung(folder: Path) -> list[str]:
    """Which modules were imported, and by which command."""
    file = folder / _SPRUNG
    return file.read_text().splitlines() if file.exists() else []
