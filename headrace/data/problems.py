"""Problems in the data, by file, row and field, collected so that they are reported together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_PROBLEMS = 20
"""Most problems that a `DataError` lists; the rest is only counted."""


class InvalidRow(Exception):
    """One row's problem. `where` is the field's dotted path, empty for the whole row."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


class UnreadableFile(Exception):
    """A file's problem; the message says what to do."""


@dataclass(frozen=True)
class Problem:
    """One problem in the data. `line` counts from 1; 0 means the whole file."""

    file: str
    line: int
    field: str
    message: str
    is_row: bool = False
    """The file has rows instead of lines: `line` - 1 is the row number, counted from 0."""

    def __str__(self) -> str:
        where = place(self.file, self.line, self.is_row)
        return f"{where}: {self.field}: {self.message}" if self.field else f"{where}: {self.message}"


def place(file: str, line: int, is_row: bool) -> str:
    """`train.jsonl:3`, or `train.parquet, row 2` (from 0, as pandas counts), or the file alone."""
    if not line:
        return file
    return f"{file}, row {line - 1}" if is_row else f"{file}:{line}"


@dataclass
class Problems:
    """Collects problems: keeps the first `MAX_PROBLEMS`, counts all."""

    kept: list[Problem] = field(default_factory=list)
    total: int = 0

    def add(self, problem: Problem) -> None:
        self.total += 1
        if len(self.kept) < MAX_PROBLEMS:
            self.kept.append(problem)

    def raise_if_any(self, summary: str) -> None:
        """Raise a DataError if there are problems; `summary` becomes the message's first line."""
        if self.total:
            raise DataError(summary, self.kept, self.total)


class DataError(ValueError):
    """The data cannot be used. `problems` holds the first ones; `total` counts all."""

    def __init__(self, summary: str, problems: Sequence[Problem] = (), total: int | None = None) -> None:
        self.problems = tuple(problems)
        self.total = len(problems) if total is None else total
        lines = [summary, *(f"  {problem}" for problem in self.problems)]
        if self.total > len(self.problems):
            lines.append(f"  and {self.total - len(self.problems)} more")
        super().__init__("\n".join(lines))


def count(n: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
