"""Measures the phases of a step where they happen, and writes the run log's rows (rank 0)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.ledger.replies import Stats
from headrace.metrics import row_keys
from headrace.records.sample_dump import SampleDump
from headrace.traces.service_recorder import recorder
from headrace.v1 import sync_pb2 as pb
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.batch import Batch
from headrace_trainer.learning.learner import Learned
from headrace_trainer.records import metrics
from headrace_trainer.records.rollouter_readings import RollouterReadings
from headrace_trainer.records.run_log import RunLog, update_gaps
from headrace_trainer.records.step_clock import StepClock, seconds
from headrace_trainer.records.trackers import Tracking
from headrace_trainer.records.update_facts import PartialCounts, UpdateFacts
from headrace_trainer.records.update_row import Update, update_row


class StepReport:
    """Measures and reports steps. Every rank has one, since sums are collective; only rank 0 writes."""

    def __init__(
        self, config: RunConfig, ledger: SyncLedger, ranks: Ranks, run_dir: Path, parameters: int = 0
    ) -> None:
        """`parameters`: number of the policy's parameters over all ranks."""
        self._config = config
        self.parameters = parameters
        self._ledger = ledger
        self._ranks = ranks
        self._log = RunLog(run_dir) if ranks.is_first else None
        self._run_dir = run_dir
        self._tracking: Tracking | None = None
        dump = config.dump
        self._dump = SampleDump(
            run_dir,
            ranks.rank,
            ranks.world_size,
            samples_per_update=dump.samples_per_update if dump.enable else 0,
            max_bytes=dump.max_bytes,
            log_probs=dump.log_probs,
        )
        self._trace = recorder(config, f"trainer-{ranks.rank}")
        self._started = time.monotonic()
        self._wall_before = 0.0
        self._clock = StepClock()
        self._wait_began = self._clock.row_began
        self._skipped = self._rejected = 0  # in updates without a row
        self._sync: dict[str, float] = {}
        self._last_commit = self._started
        self._window = -1  # in which the batch was claimed
        self._gap_bound = 0.0  # versions, of that batch
        self._read_at = 0.0  # wall clock, when the batch had arrived
        self._rollouters = RollouterReadings(ledger, config.name)
        self._stats: Stats | None = None
        self._partial = PartialCounts()  # of the open window
        self._partial_closed = PartialCounts()  # of the last closed window
        self._window_ended = False
        self._window_s = [0.0, 0.0]  # of waiting, of all updates since `window_seconds`
        if ranks.is_first:
            metrics.configure(config)
            metrics.CLOCK.begin_wait(seconds(self._wait_began))

    @property
    def wall_s(self) -> float:
        return self._wall_before + time.monotonic() - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase. A nested phase pauses the outer one's clock, so no second counts twice."""
        began = self._clock.enter(name)
        try:
            yield
        finally:
            self._trace.complete(name, began, self._clock.leave())

    def wait_for_generation(self) -> None:
        """Note that the round being waited for lets running work finish first."""
        metrics.CLOCK.begin_wait(time.monotonic(), until_transfer=True)

    def waited_for_generation(self) -> None:
        """Count part of `param_sync` as waiting for samples: the round just committed let running work finish
        first, so that part was the wait for the batch generated meanwhile."""
        pause_ns = round(self._sync.get(row_keys.SYNC_PAUSE_S, 0.0) * 1e9)
        moved = self._clock.move("param_sync", "wait_prev_gen", pause_ns)
        self._trace.instant("waited for generation", seconds=seconds(moved))

    def begin_update(self, batch: Batch, window: int, gap_bound: float) -> None:
        """Begin an update: the batch has arrived, and the time since the last row's end was the wait for it.
        `gap_bound`: largest version gap that its samples may have."""
        # An update whose samples all went back has no row: its phases go into the next row.
        now = self._clock.end_wait()
        metrics.CLOCK.end_wait(seconds(now))
        self._trace.complete("gen_wait", self._wait_began, now, samples=len(batch.items))
        self._window, self._gap_bound, self._read_at = window, gap_bound, time.time()

    # -- sync ------------------------------------------------------------------------------------

    def committed(self, c: pb.Committed, nbytes: int) -> None:
        if self._log is None:
            return
        now = time.monotonic()
        metrics.CLOCK.transfer_begins(now)  # a round without members has no transfer before its end
        self._rollouters.read()
        self._sync = self._log.committed(c, nbytes, now - self._last_commit, self._rollouters.newest)
        self._last_commit = now

    def window_ends(self) -> None:
        """Note that the update in progress is the last of its window."""
        self._window_ended = True

    def flush_round(self) -> None:
        """Write the row of the last committed round, which has waited for the engines' reports."""
        if self._log is not None:
            self._log.flush_round()

    def _read_stats(self) -> Stats | None:
        """The ledger's statistics, or the previous update's if the trainer is stopping without a ledger."""
        with self._ledger.unless_stopping():
            self._stats = self._ledger.run(ops.stats())
        return self._stats

    def canary(self, report: pb.CanaryReport) -> None:
        """Called by the sync client's thread."""
        if self._log is not None:
            self._log.canary(report.version, report.max_abs_diff)

    def window_seconds(self) -> tuple[float, float]:
        """Seconds of waiting for samples and of all updates since the last call. The update in progress
        counts in the next window."""
        waited, all_ = self._window_s
        self._window_s = [0.0, 0.0]
        return waited, all_

    # -- rows ------------------------------------------------------------------------------------

    def resumed(self, wall_s: float) -> None:
        """Continue from a checkpoint's wall clock."""
        self._wall_before = wall_s

    def began(self, step: int) -> None:
        """Recovery is done: the next update is the one after `step`."""
        if self._log is not None:
            self._tracking = Tracking(self._config, self._run_dir, step)

    def end_update(self, batch: Batch, p: TrainingProgress, learned: Learned, lr: float) -> None:
        """Collective: every rank's sums and facts, one row on rank 0."""
        self._skipped += learned.sums.skipped
        self._rejected += len(learned.rejected)
        if batch.items:
            with self.phase("report"):
                self._end_update(batch, p, learned, lr)
        elif self._window_ended:
            self._close_window()
        self._begin_wait()

    def _end_update(self, batch: Batch, p: TrainingProgress, learned: Learned, lr: float) -> None:
        self._dump.write(
            [s for mini in batch.mini for s in mini],
            step=p.step,
            version=self._window,
            lineage=p.lineage,
            advantages=learned.advantages,
        )
        total = learned.sums.over(self._ranks)
        facts = UpdateFacts.gather(self._ranks, batch, self._window)
        stats = self._read_stats() if self._log is not None else None
        p.tokens += int(total.tokens)
        p.trajectories += len(batch.items) * self._config.rollout.n
        p.stale_samples += sum(self._window - i.min_version > 0 for i in batch.items)
        p.stale_trajectories += facts.stale_trajectories
        p.partial_samples += sum(s > 0 for s in facts.spans)
        self._partial.add(facts.spans)
        if self._window_ended:
            self._close_window()
        began, ended, spent = self._clock.row()
        if self._log is None or stats is None:
            return
        self._trace.complete("step", began, ended, track="steps", step=p.step)
        update = Update(
            items=batch.items,
            window=self._window,
            read_at=self._read_at,
            learned=learned,
            total=total,
            facts=facts,
            lr=lr,
            wall_s=self.wall_s,
            step_s=seconds(ended - began),
            phases={name: seconds(ns) for name, ns in spent.items()},
            skipped=self._skipped,
            rejected=self._rejected,
        )
        self._window_s[0] += update.wait_s
        self._window_s[1] += update.step_s
        row = update_row(self._config, p, update, stats, self._partial_closed, self.parameters)
        row |= self._sync | self._log.canary_metrics()
        if self._rollouters.idle_ratio is not None:
            row["rollouter/idle_ratio"] = self._rollouters.idle_ratio
        if self._rollouters.utilization is not None:
            row["rollouter/utilization"] = self._rollouters.utilization
        self._log.update(row)
        if self._tracking is not None:
            self._tracking.check()
        self._show(row, p, update)
        self._sync = {}
        self._skipped = self._rejected = 0

    def _show(self, row: dict[str, Any], p: TrainingProgress, u: Update) -> None:
        """Update the Prometheus metrics."""
        seen = metrics.Observed(
            spans=u.facts.spans,
            update_gaps=update_gaps(u.items, p.step_of_version, u.steps_before(p)),
            latencies_s=u.latencies_s,
            rewards=u.facts.rewards,
            lengths=u.facts.lengths,
            stale_trajectories=u.facts.stale_trajectories,
        )
        metrics.observe(row, u.phases, len(u.items), self._config.rollout.n, seen, self._gap_bound)

    def _close_window(self) -> None:
        self._partial_closed, self._partial = self._partial, PartialCounts()
        self._window_ended = False

    def _begin_wait(self) -> None:
        self._wait_began = self._clock.begin_wait()
        metrics.CLOCK.begin_wait(seconds(self._wait_began))

    def close(self) -> None:
        self._trace.close()
        self._dump.close()
        if self._log is not None:
            self._log.close()
        if self._tracking is not None:
            self._tracking.close()
