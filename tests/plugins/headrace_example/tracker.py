import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config.run import RunConfig
from headrace.records.trackers import Tracker


class Csv(Tracker):
    """A line for every value: step, key, value."""

    def __init__(self, config: RunConfig, directory: Path, state: dict[str, Any], after: int) -> None:
        self._file = (directory / "points.csv").open("a", newline="")
        self._lines = csv.writer(self._file)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._lines.writerows((step, key, value) for key, value in values.items())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
