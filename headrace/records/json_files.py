"""JSON and JSON-lines files that others may read while they are written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from headrace.system import disk


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Write JSON so that readers see the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with disk.writing(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if it is missing or unreadable."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_rows(path: Path, limit: int = -1) -> list[dict[str, Any]]:
    """The objects in a JSON-lines file, without unreadable lines. `limit`: bytes to read at most."""
    rows = []
    try:
        with path.open("rb") as file:
            text = file.read(limit).decode("utf-8", errors="replace")
    except OSError:
        return []
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


class MetricsTail:
    """Reads the rows appended since the last call. A half-written row waits for the next call."""

    def __init__(self, path: Path, from_end: bool = False, offset: int = 0) -> None:
        """`from_end` skips existing rows, those of earlier starts. `offset` skips that many bytes."""
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else offset

    def new_rows(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # replaced by a shorter file
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        rows = []
        for line in complete.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows
