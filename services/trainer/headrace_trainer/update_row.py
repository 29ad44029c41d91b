"""The run log's row of one local update, from what it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import RunConfig
from headrace.ledger.replies import Claimed, Stats
from headrace_trainer.learner import Learned
from headrace_trainer.progress import Progress
from headrace_trainer.run_log import environment_metrics, spread, staleness_metrics
from headrace_trainer.update import UpdateSums
from headrace_trainer.update_facts import PartialCounts, UpdateFacts

WAITS = ("gen_wait", "wait_prev_gen")
"""Phases in which the trainer waits for samples."""


@dataclass(frozen=True)
class Update:
    """One that is over. Times are seconds."""

    items: Sequence[Claimed]
    window: int
    """In which its samples were claimed."""
    read_at: float
    """Wall clock, when the batch was here."""
    learned: Learned
    """This rank's."""
    total: UpdateSums
    """Over all ranks."""
    facts: UpdateFacts
    lr: float
    wall_s: float
    step_s: float
    phases: Mapping[str, float]
    skipped: int
    """Optimizer steps not taken, since the last row."""
    rejected: int
    """Samples sent back, since the last row."""

    @property
    def wait_s(self) -> float:
        return sum(self.phases.get(name, 0.0) for name in WAITS)

    @property
    def latencies_s(self) -> list[float]:
        """From written to read of each sample, by the wall clock that stamped both."""
        return [max(0.0, self.read_at - i.t_finished) for i in self.items]

    def steps_before(self, p: Progress) -> int:
        """Optimizer steps before this update."""
        return p.optimizer_steps - self.learned.optimizer_steps


def update_row(
    config: RunConfig, p: Progress, u: Update, stats: Stats, closed: PartialCounts, parameters: int
) -> dict[str, Any]:
    """`closed`: of the window that closed last. `parameters`: of the policy, over all ranks."""
    total, facts = u.total, u.facts
    tokens, squared = max(total.tokens, 1.0), total.weight_squared
    grad_norms = u.learned.sums.grad_norms
    samples = len(u.items)
    row: dict[str, Any] = {
        "step": p.step,
        "optimizer_steps": p.optimizer_steps,
        "lineage": p.lineage,
        "wall_s": u.wall_s,
        "trained_tokens": p.tokens,
        "trainer/idle_ratio": u.wait_s / u.step_s,
        "fully_async/count/stale_samples_processed": p.stale_samples,
        "fully_async/count/stale_trajectory_processed": p.stale_trajectories,
        "fully_async/count/total_generated_samples": stats.finished,
        "fully_async/count/dropped_stale_samples": stats.restarted,
        "fully_async/count/current_param_version": stats.version,
        "fully_async/partial/total_partial_num": closed.partial,
        "fully_async/partial/partial_ratio": closed.ratio,
        "fully_async/partial/max_partial_span": closed.largest_span,
        **staleness_metrics(u.items, u.window, p.step_of_version, u.steps_before(p)),
        "queue/depth": stats.counts["queued"],
        "queue/in_flight": stats.counts["in_flight"],
        "queue/message_latency_s": sum(u.latencies_s) / samples,
        "queue/oldest_age_s": stats.oldest_queued_age_s,
        "queue/dead": stats.counts["dead"],
        "queue/dropped": stats.counts["dropped"],
        "queue/requeued": sum(stats.requeued.values()),
        "queue/kept": sum(stats.kept.values()),
        "perf/samples_per_s": samples / u.step_s,
        "perf/tokens_per_s": tokens / u.step_s,
        "perf/steps_per_hour": 3600.0 / u.step_s,
        "actor/pg_loss": total.loss / tokens,
        "actor/pg_clipfrac": total.clipped / tokens,
        "actor/pg_clipfrac_lower": total.clipped_lower / tokens,
        "actor/ppo_kl": total.old_kl / tokens,
        "actor/entropy": total.entropy / tokens,
        "actor/grad_norm": grad_norms[-1] if grad_norms else 0.0,
        "actor/skipped_steps": u.skipped,
        "queue/rejected": u.rejected,
        "actor/lr": u.lr,
        "rollout_corr/ess": total.weight**2 / (tokens * total.weight_squared)
        if total.weight_squared > 0
        else 1.0,
        "rollout_corr/kl": total.kl / tokens,
        "rollout_corr/k3_kl": total.k3 / tokens,
        "rollout_corr/chi2_token": squared / tokens - 1.0,
        "rollout_corr/ppl_ratio": math.exp(min(total.kl / tokens, 20.0)),
        "rollout_corr/masked_fraction": total.masked / tokens,
        **spread(facts.rewards, "reward"),
        **facts.part_means,
        "response_length/mean": sum(facts.lengths) / len(facts.lengths),
        "response_length/max": max(facts.lengths),
        "response_length/clip_ratio": facts.cut / len(facts.lengths),
        "group/zero_std_ratio": facts.zero_spread / samples,
        "timing_s/step": u.step_s,
        "timing_s/reward": facts.reward_s / samples,
        **{f"timing_s/{name}": spent for name, spent in u.phases.items()},
        **u.learned.metrics,
    }
    if config.algorithm.rollout_correction.rollout_is is not None:
        row["rollout_corr/clipped_fraction"] = total.truncated / tokens
    if peak := config.trainer.peak_flops:
        # Forward and backward, two operations per parameter and token in the one, four in the other;
        # attention's own are left out (Chowdhery et al. 2022, appendix B).
        work = 6.0 * parameters * facts.tokens
        row["perf/mfu"] = work / (u.step_s * peak * config.world_size)
    if config.actor.use_kl_loss:
        row["actor/kl_loss"] = total.reference_kl / tokens
        row["actor/kl_coef"] = config.actor.kl_loss_coef
    if not config.environment.is_single_turn:
        row |= environment_metrics(facts.turns, facts.counted)
    return row
