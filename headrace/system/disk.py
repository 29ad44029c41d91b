"""A full disk as one sentence: which file, how much was to be written, how much is free, and what to do.

Python says neither the file nor its size when a write fails, and libraries wrap the error into their own.
`writing` is around every write that a run cannot do without.
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
"""All that torch's writer of archives says when a write was cut short."""
_UNITS = ("B", "kB", "MB", "GB", "TB")


PART_ONLY = "there is room for a part only"


class DiskFull(OSError):
    """The sentence. It may pass: whoever failed is started again, and goes on once there is room."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)


@contextlib.contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Writes to `path`, a file or a folder, raise DiskFull where there is no room. `needed`: bytes."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:  # whatever a library makes of it
        if (sentence := full(error, path, needed)) is None:
            raise
        raise DiskFull(sentence) from error


def full(error: BaseException, path: Path, needed: int | None = None) -> str | None:
    """The sentence, if `error` or what lies behind it says that there is no room; else None."""
    if isinstance(error, DiskFull):
        return str(error)
    found = _what(error)
    return None if found is None else sentence(found, path, needed)


def sentence(what: str, path: Path, needed: int | None = None) -> str:
    """`what`: in the system's words."""
    facts = [f"{size(needed)} were to be written"] if needed else []
    with contextlib.suppress(OSError):
        facts.append(f"{size(shutil.disk_usage(_there(path)).free)} are free")
    told = f" ({', '.join(facts)})" if facts else ""
    return (
        f"{path} cannot be written: {what}{told}; free some space there and start the run again, it goes on"
    )


def size(count: int) -> str:
    """`1.5 GB`."""
    value, unit = float(count), 0
    while value >= 1000 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def _there(path: Path) -> Path:
    """The path, or the folder above it that exists."""
    return next((p for p in (path, *path.absolute().parents) if p.exists()), path)


def _what(error: BaseException) -> str | None:
    """The system's words in an error and its causes."""
    seen: set[int] = set()
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno in _CODES:
            return os.strerror(one.errno)
        # Text alone is what a library, or another rank, has made of the error.
        if getattr(one, "errno", None) is None and (found := _WORDS.search(str(one))):
            return found.group()
        if _CUT_OFF.search(str(one)):
            return PART_ONLY
        left += [e for e in (one.__cause__, one.__context__) if e is not None]
    return None
