"""How the ranks of one launch ended: a file that a rank leaves for its launcher in their shared directory.

torchrun turns every exit code into 1. The first rank that fails knows why; the others only see it vanish.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "verdict.json"


@dataclass(frozen=True)
class LaunchVerdict:
    code: int
    """Exit code of the trainer."""
    reason: str = ""
    """A sentence; empty where nothing is wrong."""


def leave(folder: Path, verdict: LaunchVerdict) -> bool:
    """Leave `verdict`. Returns whether it is the first of the launch; later ones are dropped."""
    mine = folder / f"{_FILE}.{os.getpid()}"
    try:
        mine.write_text(json.dumps(asdict(verdict)))
    except OSError:  # disk full: the log has to do
        return True
    with contextlib.suppress(FileExistsError):
        os.link(mine, folder / _FILE)  # atomic: readers see all of it or nothing
        return True
    return False


def find(folder: Path) -> LaunchVerdict | None:
    """The first verdict of the launch, or None so far."""
    try:
        return LaunchVerdict(**json.loads((folder / _FILE).read_text()))
    except FileNotFoundError:
        return None
