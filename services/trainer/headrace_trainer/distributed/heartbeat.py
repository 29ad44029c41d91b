"""The trainer's heartbeat: it lets a liveness probe find a process that hangs where no deadline applies.

A directory of this node holds one file per process: `launcher`, and `rank-0` and so on while there are ranks.
Each process touches its own file at every micro-batch, phase and poll of a wait. A trainer that waits for
samples, a commit, other nodes or its own end therefore counts as alive, however long it waits. One whose
oldest file is older than the probe's limit does not: a deadlock, a hung kernel or a hung write. Before a
stretch without polls (loading or writing a model) the file is dated ahead by the time that may take.

    python3 -m headrace_trainer.distributed.heartbeat DIRECTORY --stale-seconds 1800

is the probe: exit code 0, or 1 and the reason. It imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

LAUNCHER = "launcher"
START_S = 900.0
"""What ranks may take until their first beat: they meet (600 s at most), import torch, form their groups."""
LONG_S = 2700.0
"""What loading a model, reading a checkpoint or writing the trained model may take."""

_file: Path | None = None


def begin(file: Path) -> None:
    """Make `beat` touch `file` in this process. The file exists already."""
    global _file
    _file = file


def beat(ahead_s: float = 0.0) -> None:
    """Record that this process makes progress. `ahead_s`: how many seconds late the next beat may be.

    Does nothing if no heartbeat was begun, or if the file is gone because the launch is over.
    """
    if _file is not None:
        now = time.time()
        with contextlib.suppress(OSError):  # if the error persists, the file goes stale
            os.utime(_file, (now, now + ahead_s))


def sleep(seconds: float) -> None:
    """Sleep once inside a wait, and beat."""
    beat()
    time.sleep(seconds)


def age_s(directory: Path) -> float:
    """Age of the oldest file in seconds, negative while dated ahead. Raises OSError if there is none."""
    oldest = (directory / LAUNCHER).stat().st_mtime
    for file in directory.glob("rank-*"):
        with contextlib.suppress(FileNotFoundError):  # the launch has just ended
            oldest = min(oldest, file.stat().st_mtime)
    return time.time() - oldest


class Launch:
    """The launcher's side: its own beat, and the files of the ranks that it starts."""

    def __init__(self, directory: Path) -> None:
        """Remove what an earlier container left in `directory`."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.ranks_ended()
        (directory / LAUNCHER).touch()
        begin(directory / LAUNCHER)

    def ranks_begin(self, count: int) -> None:
        """Watch the ranks from now on, not only from their first beat."""
        later = time.time() + START_S
        for number in range(count):
            file = rank_file(self.directory, number)
            file.touch()
            os.utime(file, (later, later))

    def ranks_ended(self) -> None:
        """Stop watching the ranks; only the launcher has to beat."""
        for file in self.directory.glob("rank-*"):
            file.unlink()


def rank_file(directory: Path, local_rank: int) -> Path:
    return directory / f"rank-{local_rank}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether the trainer of this node gets on.")
    parser.add_argument("directory", type=Path, help="its heartbeats (headrace-trainer --heartbeat)")
    parser.add_argument("--stale-seconds", type=float, required=True, help="the oldest that one may be")
    args = parser.parse_args()
    try:
        age = age_s(args.directory)
    except OSError as error:
        sys.exit(f"no heartbeat yet: {error}")
    if age > args.stale_seconds:
        names = [
            f"{file.name} ({time.time() - file.stat().st_mtime:.0f} s)"
            for file in sorted(args.directory.iterdir())
            if time.time() - file.stat().st_mtime > args.stale_seconds
        ]
        sys.exit(f"no beat within {args.stale_seconds:g} s: {', '.join(names)}")


if __name__ == "__main__":
    main()
