"""The TensorBoard tracker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.config.run import RunConfig
from headrace.records.trackers import Tracker
from headrace.records.trackers.installed import missing


class TensorBoard(Tracker):
    """Writes one event file per start under `tensorboard/`. Needs neither TensorFlow nor torch."""

    takes_back = True

    @staticmethod
    def problems(config: RunConfig) -> Iterator[str]:
        return missing("tensorboard")

    def __init__(self, config: RunConfig, directory: Path, state: dict[str, Any], after: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        # Makes readers drop points from this step on in the directory's other files.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=after + 1, session_log=start))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=entries))
        )

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
