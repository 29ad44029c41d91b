"""The run log's row of one local update, from what it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.run import RunConfig
from headrace.ledger.replies import Claimed, Stats
from headrace.metrics import row_keys
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.learning.learner import Learned
from headrace_trainer.learning.update import UpdateSums
from headrace_trainer.records.run_log import environment_metrics, spread, staleness_metrics
from headrace_trainer.records.update_facts import PartialCounts, UpdateFacts

WAITS = ("gen_wait", "wait_prev_gen")
"""Phases in which the trainer waits for samples."""


@dataclass(frozen=True)
class Update:
    """A completed update. Times are in seconds."""

    items: Sequence[Claimed]
    window: int
    """The window in which its samples were claimed."""
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
        """Time from write to read of each sample, by the wall clock that stamped both."""
        return [max(0.0, self.read_at - i.t_finished) for i in self.items]

    def steps_before(self, p: TrainingProgress) -> int:
        """Optimizer steps before this update."""
        return p.optimizer_steps - self.learned.optimizer_steps


def update_row(
    config: RunConfig, p: TrainingProgress, u: Update, stats: Stats, closed: PartialCounts, parameters: int
) -> dict[str, Any]:
    """`closed`: counts of the last closed window. `parameters`: number of the policy's, over all ranks."""
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
        row_keys.TRAINER_IDLE_RATIO: u.wait_s / u.step_s,
        row_keys.FULLY_ASYNC_COUNT_STALE_SAMPLES_PROCESSED: p.stale_samples,
        row_keys.FULLY_ASYNC_COUNT_STALE_TRAJECTORY_PROCESSED: p.stale_trajectories,
        row_keys.FULLY_ASYNC_COUNT_TOTAL_GENERATED_SAMPLES: stats.finished,
        row_keys.FULLY_ASYNC_COUNT_DROPPED_STALE_SAMPLES: stats.restarted,
        row_keys.FULLY_ASYNC_COUNT_CURRENT_PARAM_VERSION: stats.version,
        row_keys.FULLY_ASYNC_PARTIAL_TOTAL_PARTIAL_NUM: closed.partial,
        row_keys.FULLY_ASYNC_PARTIAL_PARTIAL_RATIO: closed.ratio,
        row_keys.FULLY_ASYNC_PARTIAL_MAX_PARTIAL_SPAN: closed.largest_span,
        **staleness_metrics(u.items, u.window, p.step_of_version, u.steps_before(p)),
        row_keys.QUEUE_DEPTH: stats.counts["queued"],
        row_keys.QUEUE_IN_FLIGHT: stats.counts["in_flight"],
        row_keys.QUEUE_MESSAGE_LATENCY_S: sum(u.latencies_s) / samples,
        row_keys.QUEUE_OLDEST_AGE_S: stats.oldest_queued_age_s,
        row_keys.QUEUE_DEAD: stats.counts["dead"],
        row_keys.QUEUE_DROPPED: stats.counts["dropped"],
        row_keys.QUEUE_REQUEUED: sum(stats.requeued.values()),
        row_keys.QUEUE_KEPT: sum(stats.kept.values()),
        row_keys.PERF_SAMPLES_PER_S: samples / u.step_s,
        row_keys.PERF_TOKENS_PER_S: tokens / u.step_s,
        row_keys.PERF_STEPS_PER_HOUR: 3600.0 / u.step_s,
        row_keys.ACTOR_PG_LOSS: total.loss / tokens,
        row_keys.ACTOR_PG_CLIPFRAC: total.clipped / tokens,
        row_keys.ACTOR_PG_CLIPFRAC_LOWER: total.clipped_lower / tokens,
        row_keys.ACTOR_PPO_KL: total.old_kl / tokens,
        row_keys.ACTOR_ENTROPY: total.entropy / tokens,
        row_keys.ACTOR_GRAD_NORM: grad_norms[-1] if grad_norms else 0.0,
        row_keys.ACTOR_SKIPPED_STEPS: u.skipped,
        row_keys.QUEUE_REJECTED: u.rejected,
        row_keys.ACTOR_LR: u.lr,
        row_keys.ROLLOUT_CORR_ESS: total.weight**2 / (tokens * total.weight_squared)
        if total.weight_squared > 0
        else 1.0,
        row_keys.ROLLOUT_CORR_KL: total.kl / tokens,
        row_keys.ROLLOUT_CORR_K3_KL: total.k3 / tokens,
        row_keys.ROLLOUT_CORR_CHI2_TOKEN: squared / tokens - 1.0,
        row_keys.ROLLOUT_CORR_PPL_RATIO: math.exp(min(total.kl / tokens, 20.0)),
        row_keys.ROLLOUT_CORR_MASKED_FRACTION: total.masked / tokens,
        **spread(facts.rewards, "reward"),
        **facts.part_means,
        row_keys.RESPONSE_LENGTH_MEAN: sum(facts.lengths) / len(facts.lengths),
        row_keys.RESPONSE_LENGTH_MAX: max(facts.lengths),
        row_keys.RESPONSE_LENGTH_CLIP_RATIO: facts.cut / len(facts.lengths),
        row_keys.GROUP_ZERO_STD_RATIO: facts.zero_spread / samples,
        row_keys.TIMING_S_STEP: u.step_s,
        row_keys.TIMING_S_REWARD: facts.reward_s / samples,
        **{f"timing_s/{name}": spent for name, spent in u.phases.items()},
        **u.learned.metrics,
    }
    if config.algorithm.rollout_correction.rollout_is is not None:
        row[row_keys.ROLLOUT_CORR_CLIPPED_FRACTION] = total.truncated / tokens
    if peak := config.trainer.peak_flops:
        # Two operations per parameter and token in the forward pass, four in the backward pass. Attention's
        # own are left out (Chowdhery et al. 2022, appendix B).
        work = 6.0 * parameters * facts.tokens
        row[row_keys.PERF_MFU] = work / (u.step_s * peak * config.world_size)
    if config.actor.use_kl_loss:
        row[row_keys.ACTOR_KL_LOSS] = total.reference_kl / tokens
        row[row_keys.ACTOR_KL_COEF] = config.actor.kl_loss_coef
    if not config.environment.is_single_turn:
        row |= environment_metrics(facts.turns, facts.counted)
    return row
