"""How the ranks of one launch ended: what a rank leaves for its launcher, in the directory that they share.

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
    """Whether this is the first verdict of the launch; a later one is dropped."""
    mine = folder / f"{_FILE}.{os.getpid()}"
    try:
        mine.write_text(json.dumps(asdict(verdict)))
    except OSError:  # no room even for that: the log has to do
        return True
    with contextlib.suppress(FileExistsError):
        os.link(mine, folder / _FILE)  # whole or not at all, whoever reads it
        return True
    return False


def find(folder: Path) -> LaunchVerdict | None:
    """The first verdict, once there is one."""
    try:
        return LaunchVerdict(**json.loads((folder / _FILE).read_text()))
    except FileNotFoundError:
        return None
