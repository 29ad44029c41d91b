"""The run's temporary folder: TMPDIR of everything that it starts, so that one removal leaves nothing behind.

The sockets of the coordinator and of the bundled server lie in it. vLLM's sockets, torchrun's folders and
whatever a reward writes lie below it, in a folder for each service, which is emptied when the service starts
again. The guardian removes the whole once the run's last process
is gone, however the runner ended; where the guardian was killed, too, the next start of any run of this
user does.

A folder is locked for as long as runner or guardian lives. The kernel lets go of the lock with the last of
them, so one that can be locked belongs to nobody. Only folders with our name and owner are looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "headrace-run-"
_LONGEST = 30
"""Bytes of the folder that ours is made in: a Unix socket's path ends at 107, and vLLM's name of 36 lies
below our folder and the service's."""


_ANOTHER = f"set TMPDIR to a folder on a local disk, with a path of at most {_LONGEST} bytes"


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
        parent = _parents()[0]
        try:
            root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
        except OSError as error:
            raise OSError(f"{parent}: no folder can be made there ({error.strerror}); {_ANOTHER}") from None
        try:
            descriptor = _locked(root)
            if descriptor is not None:
                _try_socket(root)
        except OSError as error:
            shutil.rmtree(root, ignore_errors=True)
            raise OSError(
                f"{parent}: a folder there cannot be locked, or takes no sockets ({error}); {_ANOTHER}"
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
    return list(dict.fromkeys([asked, usual] if len(os.fsencode(asked)) <= _LONGEST else [usual, asked]))


def exposed() -> str | None:
    """How other users could put a folder of theirs in the place of ours; None where they cannot."""
    for folder in [(parent := _parents()[0].resolve()), *parent.parents]:
        mode = folder.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            return (
                f"{folder} (mode {stat.S_IMODE(mode):04o}): other users may rename what lies there and put a "
                "folder of theirs in the place of the run's, to whose sockets its services would send the "
                f"password and the token; say chmod +t {folder}, or set TMPDIR to another folder"
            )
    return None


def _try_socket(root: Path) -> None:
    """Raise OSError where the file system has no sockets."""
    file = root / "try.sock"
    with socket.socket(socket.AF_UNIX) as tried:
        tried.bind(str(file))
    file.unlink()


def elsewhere() -> str | None:
    """What to tell whoever has named a directory that our folders cannot lie in; None where they do."""
    asked, used = Path(tempfile.gettempdir()), _parents()[0]
    if asked == used:
        return None
    return (
        f"TMPDIR: the path {asked} has {len(os.fsencode(asked))} bytes, and the engines' sockets leave room "
        f"for {_LONGEST}: temporary files go to {used}; to have them there set TMPDIR to a short symbolic "
        f"link, made by: ln -s {shlex.quote(str(asked))} /short/link"
    )


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
