"""Watch a run of another process: the display of `headrace run`, from the run's files and ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from headrace.config import loading
from headrace.config.loading import ConfigError
from headrace.local.progress import Display, RunProgress, StatsPoll, make_display
from headrace.local.services import plan
from headrace.records.json_files import MetricsTail, read_json
from headrace.records.layout import RunLayout

EXIT_CODES = {"completed": 0, "stopped": 130, "failed": 1, "killed": 1}
"""Exit codes by the run's final state, as `headrace run` has them. A killed run left no summary."""


def watch(layout: RunLayout, every_s: float, out: TextIO) -> None:
    """Show the run every `every_s` seconds until it ends."""
    display = make_display(out, f"headrace: {layout.root.name}")
    onlooker = _Onlooker(layout, display)
    try:
        while layout.in_use():
            onlooker.look()
            _wait(every_s, layout.in_use)
        onlooker.look()
    finally:
        onlooker.close()


def _wait(seconds: float, still_on: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and still_on():
        time.sleep(min(left, 0.2))


class _Onlooker:
    def __init__(self, layout: RunLayout, display: Display) -> None:
        self._layout = layout
        self._display = display
        self._tail = MetricsTail(layout.metrics)
        self._progress: RunProgress | None = None
        self._ledger: StatsPoll | None = None

    def look(self) -> None:
        progress = self._known_progress()
        ends = read_json(self._layout.endpoints)
        if progress is None or ends is None:
            self._display.phase("starting")
            return
        if self._ledger is None:
            self._ledger = StatsPoll(ends["redis_url"], ends["run"])
        progress.add_rows(self._tail.new_rows(), time.monotonic())
        progress.read_scores(self._layout.eval)
        progress.stats = self._ledger.stats
        waiting = progress.stats is not None and not progress.stats.members
        self._display.phase("no rollouter takes part" if waiting else "" if progress.step else "starting")
        self._display.update(progress)

    def _known_progress(self) -> RunProgress | None:
        """The progress; None until the run has written its configuration."""
        if self._progress is None:
            try:
                self._progress = RunProgress(plan(loading.load(self._layout.config)).updates)
            except (ConfigError, OSError):
                return None
        return self._progress

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
        self._display.close()


def how_it_ended(layout: RunLayout) -> str:
    """The state in the summary, or `killed` if the last start left none."""
    summary = layout.read_summary()
    if summary is None or not layout.config.exists():
        return "killed"
    if layout.summary.stat().st_mtime < layout.config.stat().st_mtime:  # each start rewrites it
        return "killed"
    return str(summary.get("status"))
