"""`ledger.json` in a run's directory: which ledger is the run's, and how far it was.

What Redis has it can lose. The directory remembers it from one start to the next: a ledger that is behind
it, or another one, is refused (`headrace.ledger.marks`). The local runner writes the id before anything
starts; the queue service and the trainer note what grows. A service that has no directory, in a cluster,
remembers what it has seen for as long as it lives.
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
    """Of one process."""

    def __init__(self, directory: Path | None) -> None:
        """`directory`: the run's; None: nothing is kept. Raises ConfigError for a damaged file."""
        self._path = directory / FILE if directory is not None else None
        self.marks = _read(self._path) if self._path is not None else Marks()
        self._written_at = float("-inf")

    def keep(self, seen: Marks) -> None:
        """Note what the ledger has shown, at most once a second. Raises ConfigError for a damaged file, and
        disk.DiskFull and OSError, which may pass."""
        if self._path is None or time.monotonic() - self._written_at < _EVERY_S:
            return
        marks = self.marks.with_(seen.lasting)
        if marks == self.marks:
            return
        self.marks = marks.with_(_read(self._path))  # what another service has noted stays
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
    """Readers see the old file or the new one; of two writers at once one wins, and the other comes again."""
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
