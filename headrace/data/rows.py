"""Read and check the rows of all entries of the configuration before a run starts.

What this module guarantees:

- Every problem names file, line (or row) and field. All rows are checked; the first `MAX_PROBLEMS` problems
  are reported.
- Invalid rows are an error, or with `skip_invalid` are left out and counted. Unreadable files, and entries
  with no rows left, are always errors.
- The rows of an entry are consecutive, in the order of its files and their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.data import row_files, sources
from headrace.data.problems import (
    MAX_PROBLEMS,
    DataError,
    InvalidRow,
    Problem,
    Problems,
    UnreadableFile,
    count,
)
from headrace.data.row_format import DataRow, Message, make_row

__all__ = [
    "MAX_PROBLEMS",
    "DataError",
    "Message",
    "Problem",
    "DataRow",
    "DataRows",
    "load_rows",
    "read_entries",
]

Progress = Callable[[str, int, int | None], None]
"""Called from time to time with (activity, number done, total or None if unknown)."""

_PROGRESS_EVERY = 1000


@dataclass(frozen=True)
class DataRows:
    """The rows that were read."""

    rows: list[DataRow]
    sizes: list[int]
    """Number of rows of each entry."""
    skipped: Problems
    """Rows that were left out."""


def load_rows(entries: Sequence[str | Path]) -> list[DataRow]:
    """The rows of `entries`, in order. Checks all of them, then raises DataError if any is invalid."""
    return read_entries([str(entry) for entry in entries]).rows


def read_entries(
    entries: Sequence[str],
    *,
    skip_invalid: bool = False,
    ground_truth_as_json: bool = False,
    progress: Progress | None = None,
) -> DataRows:
    """The rows of files, directories, globs and `reasoning_gym:` names. Raises DataError."""
    rows: list[DataRow] = []
    sizes: list[int] = []
    fatal, invalid = Problems(), Problems()
    for entry in entries:
        before = len(rows)
        for file, line, value, is_row in _values(entry, fatal):
            if not isinstance(value, InvalidRow):
                try:
                    rows.append(
                        make_row(
                            len(rows),
                            file,
                            line,
                            value,
                            is_row=is_row,
                            ground_truth_as_json=ground_truth_as_json,
                        )
                    )
                except InvalidRow as problem:
                    value = problem
            if isinstance(value, InvalidRow):
                invalid.add(Problem(file, line, value.where, str(value), is_row))
            done = len(rows) + invalid.total
            if progress is not None and done % _PROGRESS_EVERY == 0:
                progress("reading rows", done, None)
        sizes.append(len(rows) - before)
        if skip_invalid and not sizes[-1] and not fatal.total:
            fatal.add(Problem(entry, 0, "", "no row of it can be used"))
    if not entries:
        fatal.add(Problem("data", 0, "", "no file is named"))
    if fatal.total or (invalid.total and not skip_invalid):
        both = Problems(fatal.kept + invalid.kept, fatal.total + invalid.total)
        both.kept[MAX_PROBLEMS:] = []
        hint = "; data.skip_invalid leaves such rows out" if invalid.total and not skip_invalid else ""
        both.raise_if_any(f"{count(both.total, 'problem')} in the data{hint}:")
    return DataRows(rows, sizes, invalid)


def _values(entry: str, fatal: Problems) -> Iterator[tuple[str, int, Any, bool]]:
    """Yield (file, line or row, value or InvalidRow, whether it is a row); unreadable files go to `fatal`."""
    if sources.is_source(entry):
        try:
            for number, value in sources.values(entry):
                yield entry, number, value, True
        except UnreadableFile as error:
            fatal.add(Problem(entry, 0, "", str(error)))
        return
    try:
        files = row_files.expand(entry)
    except (UnreadableFile, OSError) as error:
        fatal.add(Problem(entry, 0, "", str(error)))
        return
    for file in files:
        empty = True
        try:
            content = row_files.open_file(file)
            for line, value in content.values:
                empty = False
                yield file, line, value, content.is_row
        except UnreadableFile as error:
            fatal.add(Problem(file, 0, "", str(error)))
            continue
        if empty:
            fatal.add(Problem(file, 0, "", "the file has no rows"))
