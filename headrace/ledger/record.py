"""`ledger.json` in a run's directory: which ledger belongs to the run, and how far it had got.

Redis can lose data, so the directory remembers the ledger across starts. A ledger that is behind the record,
or a different one, is refused (`headrace.ledger.marks`). The local runner writes the id before anything
starts; the queue service and the trainer record progress. A service without a directory (in a cluster)
remembers what it has seen only for its own lifetime.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from headrace.config.loading import ConfigError
from headrace.ledger.marks import Marks
from headrace.system import disk

FILE = "ledger.json"
_EVERY_S = 1.0


class LedgerRecord:
    """One process's view of `ledger.json`."""

    def __init__(self, directory: Path | None) -> None:
        """`directory`: the run's; None keeps no record. Raises ConfigError for a damaged file."""
        self._path = directory / FILE if directory is not None else None
        self.marks = _read(self._path) if self._path is not None else Marks()
        self._written_at = float("-inf")

    def keep(self, seen: Marks) -> None:
        """Record what was seen of the ledger, at most once a second.

        Raises ConfigError for a damaged file; disk.DiskFull and OSError, which may be temporary.
        """
        if self._path is None or time.monotonic() - self._written_at < _EVERY_S:
            return
        marks = self.marks.with_(seen.lasting)
        if marks == self.marks:
            return
        self.marks = marks.with_(_read(self._path))  # keep what another service recorded
        _write(self._path, self.marks)
        self._written_at = time.monotonic()


def _read(path: Path) -> Marks:
    try:
        found = json.loads(path.read_text())
        marks = Marks(**found)
        if [type(v) for v in asdict(marks).values()] != [type(v) for v in asdict(Marks()).values()]:
            raise TypeError("a value has another type")
    except FileNotFoundError:
        return Marks()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            [
                f"{path}: cannot be read ({error}). It says which ledger in Redis is this run's: bring it "
                "back, or delete it if you are sure that the ledger there is the right one"
            ]
        ) from None
    return marks


def _write(path: Path, marks: Marks) -> None:
    """Replace the file atomically. Of two concurrent writers one wins; the other writes again later."""
    kept = asdict(marks)
    del kept["writes"]
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with disk.writing(path), partial.open("w") as file:
            json.dump(kept, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
