"""Decides when a checkpoint is written: after a commit, by versions or by time, and at the end."""

from __future__ import annotations

import time

from headrace.config.run import RunConfig
from headrace_trainer.checkpoints.checkpoint import Checkpoints
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.records.report import StepReport


class SaveSchedule:
    """Decides when to save. Every rank makes the same calls."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        checkpoints: Checkpoints,
        progress: TrainingProgress,
        report: StepReport,
    ) -> None:
        self._trainer = config.trainer
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._progress = progress
        self._report = report
        self._saved_at = time.monotonic()

    def committed(self, snapshot: int = -1) -> None:
        """Save if it is due, after a commit. `snapshot`: the version that the present weights will become
        next."""
        if self._progress.step and self._is_time():
            self.save(snapshot=snapshot)

    def _is_time(self) -> bool:
        t = self._trainer
        if t.save_freq and self._progress.version % t.save_freq == 0:
            return True
        if not t.save_interval_s:
            return False
        elapsed = time.monotonic() - self._saved_at
        return bool(self._ranks.share(elapsed >= t.save_interval_s if self._ranks.is_first else None))

    def save(self, wait: bool = False, snapshot: int = -1) -> None:
        """Save a checkpoint of the present state. It is written while training continues, unless `wait`."""
        self._progress.snapshot = snapshot
        with self._report.phase("save_checkpoint"):
            self._progress.wall_s = self._report.wall_s
            (self._checkpoints.save if wait else self._checkpoints.begin)(self._progress)
            self._saved_at = time.monotonic()
