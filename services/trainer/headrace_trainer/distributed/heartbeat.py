"""The trainer's heartbeat: who stands still where no deadline looks, a liveness probe finds by it.

A directory of this node holds one file per process: `launcher`, and `rank-0` and so on while there are ranks.
Each sets the time of its own file again at every micro-batch, phase and turn of a wait. So a trainer that
waits, for samples, for a commit, for other nodes or for its end, is alive, however long it waits; one whose
oldest file is older than the probe's limit is not: a deadlock, a kernel or a write that hangs. Before a
stretch without turns (loading a model, writing one) the file is dated ahead by what that may take.

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
    """From now on `beat` in this process is about `file`, which somebody has made."""
    global _file
    _file = file


def beat(ahead_s: float = 0.0) -> None:
    """This process gets on. `ahead_s`: the next beat may come so many seconds later than usual.

    Nothing at all where no heartbeat was begun, and where the file is gone: then the launch is over.
    """
    if _file is not None:
        now = time.time()
        with contextlib.suppress(OSError):  # if it stays so, the file gets old
            os.utime(_file, (now, now + ahead_s))


def sleep(seconds: float) -> None:
    """A turn of a wait."""
    beat()
    time.sleep(seconds)


def age_s(directory: Path) -> float:
    """Of the oldest file, in seconds; below 0 while it is dated ahead. Raises OSError when there is none."""
    oldest = (directory / LAUNCHER).stat().st_mtime
    for file in directory.glob("rank-*"):
        with contextlib.suppress(FileNotFoundError):  # the launch has just ended
            oldest = min(oldest, file.stat().st_mtime)
    return time.time() - oldest


class Launch:
    """The launcher's side: its own beat, and the files of the ranks that it starts."""

    def __init__(self, directory: Path) -> None:
        """What an earlier container has left there goes."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.ranks_ended()
        (directory / LAUNCHER).touch()
        begin(directory / LAUNCHER)

    def ranks_begin(self, count: int) -> None:
        """They are watched from now on, not only from their first beat."""
        later = time.time() + START_S
        for number in range(count):
            file = rank_file(self.directory, number)
            file.touch()
            os.utime(file, (later, later))

    def ranks_ended(self) -> None:
        """They are gone; nobody has to beat but the launcher."""
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
