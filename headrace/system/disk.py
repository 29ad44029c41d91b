"""A full disk as one sentence: which file, how much was to be written, how much is free, and what to do.

When a write fails, Python reports neither the file nor its size, and libraries wrap the error in their own.
`writing` surrounds every write that a run depends on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_WORDS = re.compile("|".join(re.escape(os.strerror(code)) for code in sorted(_CODES)))
_CUT_OFF = re.compile(r"unexpected pos \d+ vs \d+")
"""The only thing that torch's archive writer reports about a short write."""
_UNITS = ("B", "kB", "MB", "GB", "TB")


PART_ONLY = "there is room for a part only"


class DiskFull(OSError):
    """A full disk; the text is the sentence. Transient: a restarted process resumes once there is space."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)


@contextlib.contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn a full disk while writing to `path`, a file or folder, into DiskFull. `needed`: bytes."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:  # libraries raise their own types
        if (sentence := full(error, path, needed)) is None:
            raise
        raise DiskFull(sentence) from error


def full(error: BaseException, path: Path, needed: int | None = None) -> str | None:
    """Return the sentence if `error` or one of its causes reports a full disk; else None."""
    if isinstance(error, DiskFull):
        return str(error)
    found = _what(error)
    return None if found is None else sentence(found, path, needed)


def sentence(what: str, path: Path, needed: int | None = None) -> str:
    """Return the sentence. `what`: the operating system's error text."""
    facts = [f"{size(needed)} were to be written"] if needed else []
    with contextlib.suppress(OSError):
        facts.append(f"{size(shutil.disk_usage(_there(path)).free)} are free")
    told = f" ({', '.join(facts)})" if facts else ""
    return (
        f"{path} cannot be written: {what}{told}; free some space there and start the run again, it goes on"
    )


def size(count: int) -> str:
    """Format a number of bytes, such as `1.5 GB`."""
    value, unit = float(count), 0
    while value >= 1000 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def _there(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    return next((p for p in (path, *path.absolute().parents) if p.exists()), path)


def _what(error: BaseException) -> str | None:
    """Return the operating system's error text from an error or its causes."""
    seen: set[int] = set()
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno in _CODES:
            return os.strerror(one.errno)
        # A library, or another rank, may pass on only the text of the error.
        if getattr(one, "errno", None) is None and (found := _WORDS.search(str(one))):
            return found.group()
        if _CUT_OFF.search(str(one)):
            return PART_ONLY
        left += [e for e in (one.__cause__, one.__context__) if e is not None]
    return None
