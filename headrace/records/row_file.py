"""An append-only file of JSON rows, one per line.

A row has reached the operating system when the call returns, and the disk if `durable` is set. A row that
does not fit on the disk leaves no trace. A row that was cut off (by a power failure, or an older release)
stays on a line of its own, which readers skip.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.system import disk


class RowFile:
    """The writer of such a file."""

    def __init__(self, path: Path, durable: bool = False) -> None:
        """`durable`: a row survives a power failure once `write` has returned. Raises OSError."""
        self._durable = durable
        self._path = path
        self._file = path.open("a+b", buffering=0)
        if self._file.tell() and self._ends_in_the_middle():
            self.append(b"\n")
        self.rows = self._lines() if self.size else 0  # a device may be read for ever
        """Number of lines in the file, including those that were cut off."""

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. Raises disk.DiskFull, OSError."""
        self.append(json.dumps(row).encode() + b"\n")
        self.rows += 1

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, line: bytes) -> None:
        """Append an encoded row that ends in a newline. Raises disk.DiskFull, OSError."""
        with disk.writing(self._path, len(line)):
            before = self.size
            left = memoryview(line)
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with contextlib.suppress(OSError):  # e.g. a pipe, which has no length
                    os.ftruncate(self._file.fileno(), before)
                raise
            if self._durable:
                os.fsync(self._file.fileno())

    def _lines(self) -> int:
        self._file.seek(0)
        return sum(block.count(b"\n") for block in iter(lambda: self._file.read(1 << 20), b""))

    def _ends_in_the_middle(self) -> bool:
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Line:
    """A line of such a file. `row` is None if the line holds no JSON object."""

    number: int
    text: str
    row: dict[str, Any] | None
    whole: bool
    """The line ends in a newline: it was not cut off."""


def read_lines(path: Path) -> list[Line]:
    """Read every line; none if the file does not exist."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    out = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line and number == len(lines):
            continue  # after the last newline
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        out.append(Line(number, line, row if isinstance(row, dict) else None, number < len(lines)))
    return out
