"""Measures the phases of a step where they happen, and writes the run log's rows (rank 0)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from headrace import telemetry
from headrace.config import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.ledger.replies import Stats
from headrace.sample_dump import SampleDump
from headrace.trace import recorder
from headrace.v1 import sync_pb2 as pb
from headrace_trainer import metrics
from headrace_trainer.batch import Batch
from headrace_trainer.learner import Learned
from headrace_trainer.progress import Progress
from headrace_trainer.ranks import Ranks
from headrace_trainer.run_log import (
    RunLog,
    environment_metrics,
    part_means,
    part_sums,
    spread,
    staleness_metrics,
    update_gaps,
)
from headrace_trainer.step_clock import StepClock, seconds
from headrace_trainer.trackers import Tracking
from headrace_trainer.update import UpdateSums

WAITS = ("gen_wait", "wait_prev_gen")
"""Phases in which the trainer waits for samples."""


class Report:
    """Every rank has one, since sums are collective; only rank 0 writes."""

    def __init__(
        self, config: RunConfig, ledger: SyncLedger, ranks: Ranks, run_dir: Path, parameters: int = 0
    ) -> None:
        """`parameters`: how many the policy has, over all ranks."""
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
        self._window = -1  # the one in which the batch was claimed
        self._gap_bound = 0.0  # versions, of that batch
        self._read_at = 0.0  # wall clock, when the batch was here
        self._telemetry: dict[str, telemetry.RolloutTelemetry] | None = None
        self._stats: Stats | None = None
        self._idle: float | None = None
        self._utilization: float | None = None
        self._partial_in_window = [0, 0, 0]  # partial samples, samples, largest span of the open window
        self._shown_partial = [0, 0, 0]  # of the one that closed last
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
        """Measure a phase. A phase within a phase stops the outer one's clock: no second counts twice."""
        began = self._clock.enter(name)
        try:
            yield
        finally:
            self._trace.complete(name, began, self._clock.leave())

    def wait_for_generation(self) -> None:
        """The round that is waited for now lets running work finish first."""
        metrics.CLOCK.begin_wait(time.monotonic(), until_transfer=True)

    def waited_for_generation(self) -> None:
        """The round that has just committed let running work finish first: that part of `param_sync` is the
        wait for the batch that generated meanwhile."""
        pause_ns = round(self._sync.get("sync/pause_s", 0.0) * 1e9)
        moved = self._clock.move("param_sync", "wait_prev_gen", pause_ns)
        self._trace.instant("waited for generation", seconds=seconds(moved))

    def begin_update(self, batch: Batch, window: int, gap_bound: float) -> None:
        """The batch is here: what lies between the last row's end and now was waiting for it. `gap_bound`:
        largest version gap that its samples may have."""
        # Of an update whose samples all went back there is no row: its phases go into the next one's.
        now = self._clock.end_wait()
        metrics.CLOCK.end_wait(seconds(now))
        self._trace.complete("gen_wait", self._wait_began, now, samples=len(batch.items))
        self._window, self._gap_bound, self._read_at = window, gap_bound, time.time()

    # -- sync ------------------------------------------------------------------------------------

    def committed(self, c: pb.Committed, nbytes: int) -> None:
        if self._log is None:
            return
        now = time.monotonic()
        metrics.CLOCK.transfer_begins(now)  # a round without members has none before its end
        self._read_telemetry()
        self._sync = self._log.committed(c, nbytes, now - self._last_commit, self._telemetry)
        self._last_commit = now

    def window_ends(self) -> None:
        """The update that is under way is the last of its window."""
        self._window_ended = True

    def flush_round(self) -> None:
        """The row of the last committed round, which waits for the reports of the engines, is due now."""
        if self._log is not None:
            self._log.flush_round()

    def _read_telemetry(self) -> None:
        """Idle ratio since the last reading; without a reading the last one stays. The first of a start has
        none before it: what the rollouters did until then is no business of its windows."""
        key = telemetry.telemetry_key(self._config.name)
        try:
            fresh = telemetry.decode_all(self._ledger.redis.hgetall(key))  # type: ignore[arg-type]
        except redis.RedisError:
            return  # nothing depends on it
        if self._telemetry is not None:
            idle = telemetry.idle_ratio(self._telemetry, fresh)
            self._idle = idle if idle is not None else self._idle
            busy = telemetry.utilization(self._telemetry, fresh)
            self._utilization = busy if busy is not None else self._utilization
        self._telemetry = fresh

    def _read_stats(self) -> Stats | None:
        """The ledger's; those of the update before when a stop was asked for and the ledger went first."""
        with self._ledger.unless_stopping():
            self._stats = self._ledger.run(ops.stats())
        return self._stats

    def canary(self, report: pb.CanaryReport) -> None:
        """Called by the sync client's thread."""
        if self._log is not None:
            self._log.canary(report.version, report.max_abs_diff)

    def window_seconds(self) -> tuple[float, float]:
        """Seconds of waiting for samples and of all updates since the last call; without the update that is
        under way, which counts in the next window."""
        waited, all_ = self._window_s
        self._window_s = [0.0, 0.0]
        return waited, all_

    # -- rows ------------------------------------------------------------------------------------

    def resumed(self, wall_s: float) -> None:
        """Count on from a checkpoint's wall clock."""
        self._wall_before = wall_s

    def began(self, step: int) -> None:
        """Recovered: the next update is the one after `step`."""
        if self._log is not None:
            self._tracking = Tracking(self._config, self._run_dir, step)

    def end_update(self, batch: Batch, p: Progress, learned: Learned, lr: float) -> None:
        """Collective: every rank's sums and facts, one row on rank 0."""
        self._skipped += learned.sums.skipped
        self._rejected += len(learned.rejected)
        if batch.items:
            with self.phase("report"):
                self._end_update(batch, p, learned, lr)
        elif self._window_ended:
            self._close_window()
        self._begin_wait()

    def _end_update(self, batch: Batch, p: Progress, learned: Learned, lr: float) -> None:
        self._dump.write(
            [s for mini in batch.mini for s in mini],
            step=p.step,
            version=self._window,
            lineage=p.lineage,
            advantages=learned.advantages,
        )
        total = learned.sums.over(self._ranks)
        mine = [t for mini in batch.mini for s in mini for t in s.trajectories]
        facts = self._ranks.gather_all(
            {
                "rewards": [t.reward for t in mine],
                "reward_s": [s.reward_s for mini in batch.mini for s in mini],
                "parts": part_sums([t.reward_parts for t in mine]),
                "lengths": [len(t.token_ids) for t in mine],
                "tokens": sum(
                    len(s.prompt.token_ids) + len(t.token_ids)
                    for mini in batch.mini
                    for s in mini
                    for t in s.trajectories
                ),
                "cut": sum(t.finish_reason == 2 for t in mine),
                "zero": sum(
                    len({t.reward for t in s.trajectories}) == 1 for mini in batch.mini for s in mini
                ),
                "spans": [s.span for mini in batch.mini for s in mini],
                "stale": sum(t.versions is not None and t.versions[0] < self._window for t in mine),
                "turns": [t.turns for t in mine],
                "counted": [t.environment_metrics for t in mine],
            }
        )
        stats = self._read_stats() if self._log is not None else None
        window = self._window
        samples = len(batch.items)
        stale = sum(window - i.min_version > 0 for i in batch.items)
        spans = [s for f in facts for s in f["spans"]]
        p.tokens += int(total.tokens)
        p.trajectories += samples * self._config.rollout.n
        p.stale_samples += stale
        stale_trajectories = sum(f["stale"] for f in facts)
        p.stale_trajectories += stale_trajectories
        p.partial_samples += sum(s > 0 for s in spans)
        self._partial_in_window[0] += sum(s > 0 for s in spans)
        self._partial_in_window[1] += samples
        self._partial_in_window[2] = max([self._partial_in_window[2], *spans])
        if self._window_ended:
            self._close_window()
        began, ended, spent = self._clock.row()
        if self._log is None or stats is None:
            return
        self._trace.complete("step", began, ended, track="steps", step=p.step)
        step_s, phases = seconds(ended - began), {name: seconds(ns) for name, ns in spent.items()}
        self._window_s[0] += sum(phases.get(name, 0.0) for name in WAITS)
        self._window_s[1] += step_s
        row = self._row(batch, p, learned, total, facts, stats, step_s, phases, lr)
        row |= self._log.canary_metrics()
        self._log.update(row)
        if self._tracking is not None:
            self._tracking.check()
        seen = metrics.Observed(
            spans=spans,
            update_gaps=update_gaps(batch.items, p.step_of_version, self._steps_before(p, learned)),
            latencies_s=_latencies(batch, self._read_at),
            rewards=[r for f in facts for r in f["rewards"]],
            lengths=[n for f in facts for n in f["lengths"]],
            stale_trajectories=stale_trajectories,
        )
        metrics.observe(row, phases, samples, self._config.rollout.n, seen, self._gap_bound)
        self._sync = {}
        self._skipped = self._rejected = 0

    def _close_window(self) -> None:
        self._shown_partial, self._partial_in_window = self._partial_in_window, [0, 0, 0]
        self._window_ended = False

    def _begin_wait(self) -> None:
        self._wait_began = self._clock.begin_wait()
        metrics.CLOCK.begin_wait(seconds(self._wait_began))

    @staticmethod
    def _steps_before(p: Progress, learned: Learned) -> int:
        """Optimizer steps before this update."""
        return p.optimizer_steps - learned.optimizer_steps

    def _row(
        self,
        batch: Batch,
        p: Progress,
        learned: Learned,
        total: UpdateSums,
        facts: list[dict[str, Any]],
        stats: Stats,
        step_s: float,
        phases: dict[str, float],
        lr: float,
    ) -> dict[str, Any]:
        tokens, squared = max(total.tokens, 1.0), total.weight_squared
        grad_norms = learned.sums.grad_norms
        rewards = [r for f in facts for r in f["rewards"]]
        lengths = [n for f in facts for n in f["lengths"]]
        samples = len(batch.items)
        partial, in_window, span = self._shown_partial
        row: dict[str, Any] = {
            "step": p.step,
            "optimizer_steps": p.optimizer_steps,
            "lineage": p.lineage,
            "wall_s": self.wall_s,
            "trained_tokens": p.tokens,
            "trainer/idle_ratio": sum(phases.get(name, 0.0) for name in WAITS) / step_s,
            "fully_async/count/stale_samples_processed": p.stale_samples,
            "fully_async/count/stale_trajectory_processed": p.stale_trajectories,
            "fully_async/count/total_generated_samples": stats.finished,
            "fully_async/count/dropped_stale_samples": stats.restarted,
            "fully_async/count/current_param_version": stats.version,
            "fully_async/partial/total_partial_num": partial,
            "fully_async/partial/partial_ratio": partial / in_window if in_window else 0.0,
            "fully_async/partial/max_partial_span": span,
            **staleness_metrics(batch.items, self._window, p.step_of_version, self._steps_before(p, learned)),
            "queue/depth": stats.counts["queued"],
            "queue/in_flight": stats.counts["in_flight"],
            "queue/message_latency_s": sum(_latencies(batch, self._read_at)) / samples,
            "queue/oldest_age_s": stats.oldest_queued_age_s,
            "queue/dead": stats.counts["dead"],
            "queue/dropped": stats.counts["dropped"],
            "queue/requeued": sum(stats.requeued.values()),
            "queue/kept": sum(stats.kept.values()),
            "perf/samples_per_s": samples / step_s,
            "perf/tokens_per_s": tokens / step_s,
            "perf/steps_per_hour": 3600.0 / step_s,
            "actor/pg_loss": total.loss / tokens,
            "actor/pg_clipfrac": total.clipped / tokens,
            "actor/pg_clipfrac_lower": total.clipped_lower / tokens,
            "actor/ppo_kl": total.old_kl / tokens,
            "actor/entropy": total.entropy / tokens,
            "actor/grad_norm": grad_norms[-1] if grad_norms else 0.0,
            "actor/skipped_steps": self._skipped,
            "queue/rejected": self._rejected,
            "actor/lr": lr,
            "rollout_corr/ess": total.weight**2 / (tokens * total.weight_squared)
            if total.weight_squared > 0
            else 1.0,
            "rollout_corr/kl": total.kl / tokens,
            "rollout_corr/k3_kl": total.k3 / tokens,
            "rollout_corr/chi2_token": squared / tokens - 1.0,
            "rollout_corr/ppl_ratio": math.exp(min(total.kl / tokens, 20.0)),
            "rollout_corr/masked_fraction": total.masked / tokens,
            **spread(rewards, "reward"),
            **part_means([f["parts"] for f in facts]),
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": max(lengths),
            "response_length/clip_ratio": sum(f["cut"] for f in facts) / len(lengths),
            "group/zero_std_ratio": sum(f["zero"] for f in facts) / samples,
            "timing_s/step": step_s,
            "timing_s/reward": sum(s for f in facts for s in f["reward_s"]) / samples,
            **{f"timing_s/{name}": spent for name, spent in phases.items()},
            **learned.metrics,
            **self._sync,
        }
        if self._config.algorithm.rollout_correction.rollout_is is not None:
            row["rollout_corr/clipped_fraction"] = total.truncated / tokens
        if peak := self._config.trainer.peak_flops:
            # Forward and backward, two operations per parameter and token in the one, four in the other;
            # attention's own are left out (Chowdhery et al. 2022, appendix B).
            work = 6.0 * self.parameters * sum(f["tokens"] for f in facts)
            row["perf/mfu"] = work / (step_s * peak * self._config.world_size)
        if self._config.actor.use_kl_loss:
            row["actor/kl_loss"] = total.reference_kl / tokens
            row["actor/kl_coef"] = self._config.actor.kl_loss_coef
        if not self._config.environment.is_single_turn:
            turns, counted = ([x for f in facts for x in f[key]] for key in ("turns", "counted"))
            row |= environment_metrics(turns, counted)
        if self._idle is not None:
            row["rollouter/idle_ratio"] = self._idle
        if self._utilization is not None:
            row["rollouter/utilization"] = self._utilization
        return row

    def close(self) -> None:
        self._trace.close()
        self._dump.close()
        if self._log is not None:
            self._log.close()
        if self._tracking is not None:
            self._tracking.close()


def _latencies(batch: Batch, read_at: float) -> list[float]:
    """Seconds from written to read of each sample, by the wall clock that stamped both."""
    return [max(0.0, read_at - i.t_finished) for i in batch.items]
