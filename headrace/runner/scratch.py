"""The run's temporary folder: TMPDIR of everything that it starts, so that one removal leaves nothing behind.

vLLM's sockets, torchrun's folders and whatever a reward writes lie below it, in a folder for each service,
which is emptied when the service starts again. The guardian removes the whole once the run's last process
is gone, however the runner ended; where the guardian was killed, too, the next start of any run of this
user does.

A folder is locked for as long as runner or guardian lives. The kernel lets go of the lock with the last of
them, so one that can be locked belongs to nobody. Only folders with our name and owner are looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "headrace-run-"
_LONGEST = 30
"""Characters of the folder that ours is made in: a Unix socket's path ends at 107, and vLLM's name of 36 lies
below our folder and the service's."""


@dataclass(frozen=True)
class Scratch:
    root: Path
    descriptor: int
    """Of the folder, locked. Whoever holds a copy keeps it from being taken for a dead run's."""

    def remove(self) -> None:
        """Safe to call twice, and after the guardian."""
        shutil.rmtree(self.root, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def create() -> Scratch:
    """A new folder, and those of dead runs are gone. Raises OSError."""
    remove_dead()
    while True:
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_parents()[0]))
        try:
            descriptor = _locked(root)
        except OSError as error:
            shutil.rmtree(root, ignore_errors=True)
            raise OSError(
                f"{root.parent}: a folder there cannot be locked ({error}); set TMPDIR to one on a local disk"
            ) from None
        if descriptor is not None:
            return Scratch(root, descriptor)  # else another start has taken it for a dead one's


def emptied(root: Path, service: str) -> Path:
    """The service's own folder below `root`, with nothing in it."""
    folder = root / service
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def remove_dead() -> None:
    """Remove the folders of runs whose last process is gone."""
    for parent in _parents():
        for root in _ours(parent):
            with contextlib.suppress(OSError):
                descriptor = _locked(root)
                if descriptor is not None:
                    shutil.rmtree(root, ignore_errors=True)
                    os.close(descriptor)


def _parents() -> list[Path]:
    """Where folders are made, then where others may lie. The temporary directory, if its path is short."""
    asked, usual = Path(tempfile.gettempdir()), Path("/tmp")
    return list(dict.fromkeys([asked, usual] if len(str(asked)) <= _LONGEST else [usual, asked]))


def _ours(parent: Path) -> Iterator[Path]:
    for root in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = root.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                yield root


def _locked(root: Path) -> int | None:
    """A descriptor that holds the lock of the folder; None when it is somebody's, or gone. Raises OSError
    where the file system knows no locks."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.fstat(descriptor).st_ino == root.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        mine = False
    except OSError:
        os.close(descriptor)
        raise
    if mine:
        return descriptor
    os.close(descriptor)
    return None
