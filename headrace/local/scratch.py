"""The run's temporary folder: the TMPDIR of every process it starts, so one removal cleans up everything.

It holds the sockets of the coordinator and of the bundled server. Below it, each service has a folder for
vLLM's sockets, torchrun's files and whatever a reward writes, which is emptied when the service restarts.
The guardian removes the whole folder once the run's last process is gone, however the runner ended. If the
guardian was killed too, the next start of any run of this user removes it.

A folder is locked as long as the runner or the guardian lives. The kernel releases the lock with the last
of them, so a folder that can be locked is unused. Only folders with our prefix and owner are considered.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
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
"""Longest path of the parent folder, in bytes. A Unix socket's path has at most 107 bytes, which must also
fit our folder, the service's folder and vLLM's file name of 36 bytes."""


_ANOTHER = f"set TMPDIR to a folder on a local disk, with a path of at most {_LONGEST} bytes"


@dataclass(frozen=True)
class Scratch:
    root: Path
    descriptor: int
    """Descriptor of the locked folder. While any copy is open, the folder counts as in use."""

    def remove(self) -> None:
        """Remove the folder. Safe to call twice, or after the guardian removed it."""
        shutil.rmtree(self.root, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def create() -> Scratch:
    """Remove the folders of dead runs and create a new one. Raises OSError."""
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
            return Scratch(root, descriptor)
        # Another start locked it before us, as a dead run's folder, and removes it: try again.


def emptied(root: Path, service: str) -> Path:
    """Return the service's own folder below `root`, emptied."""
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
    """The directory for new folders, then others where old ones may be.

    New folders go to the temporary directory if its path is short enough, otherwise to /tmp.
    """
    asked, usual = Path(tempfile.gettempdir()), Path("/tmp")
    return list(dict.fromkeys([asked, usual] if len(os.fsencode(asked)) <= _LONGEST else [usual, asked]))


def exposed() -> str | None:
    """Warn if other users could replace our folder with theirs; None if they cannot."""
    for folder in [(parent := _parents()[0].resolve()), *parent.parents]:
        found = folder.stat()
        mode = found.st_mode
        others = stat.S_IWOTH if _is_alone(found.st_gid) else stat.S_IWGRP | stat.S_IWOTH
        if mode & others and not mode & stat.S_ISVTX:
            return (
                f"{folder} (mode {stat.S_IMODE(mode):04o}): other users may rename what lies there and put a "
                "folder of theirs in the place of the run's, to whose sockets its services would send the "
                f"password and the token; say chmod +t {folder}, or set TMPDIR to another folder"
            )
    return None


def _is_alone(group: int) -> bool:
    """Whether a group has nobody in it but us, as the group that many systems make for each user."""
    try:
        return group == os.getgid() and not set(grp.getgrgid(group).gr_mem) - {
            pwd.getpwuid(os.getuid()).pw_name
        }
    except KeyError:
        return False


def _try_socket(root: Path) -> None:
    """Raise OSError if the file system does not support sockets."""
    file = root / "try.sock"
    with socket.socket(socket.AF_UNIX) as tried:
        tried.bind(str(file))
    file.unlink()


def elsewhere() -> str | None:
    """Warn if TMPDIR names a directory whose path is too long for our folders; None if it is usable."""
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
    """Lock the folder and return the descriptor; None if it is in use or gone.

    Raises OSError if the file system does not support locks.
    """
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
