"""Describe how a process ended, and read the end of its log."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def describe_exit(name: str, code: int) -> str:
    """`rollouter-1 exited with code 3`, or `rollouter-1 was killed by SIGKILL`."""
    if code >= 0:
        return f"{name} exited with code {code}"
    try:
        return f"{name} was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"{name} was killed by signal {-code}"


def last_lines(log: Path, count: int = 20) -> list[str]:
    """The last lines of a log file; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode("utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []
