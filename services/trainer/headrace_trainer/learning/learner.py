"""One local update: score the batch, make advantages, step policy and critic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from headrace.algorithms.kl import AdaptiveKl
from headrace.config.algorithm_checks import load_algorithms
from headrace.config.run import RunConfig
from headrace.metrics import row_keys
from headrace.wire.payloads import Sample
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.advantages import BatchKl, fill_advantages
from headrace_trainer.learning.update import Updater, UpdateSums
from headrace_trainer.model.critic import Critic, ValueSums, value_metrics
from headrace_trainer.model.optimize import Learnable, learnable
from headrace_trainer.model.policy import load_policy
from headrace_trainer.model.reference import Reference
from headrace_trainer.model.rows import BatchRow, make_rows, mean_advantages

log = logging.getLogger("headrace.trainer.learner")

Phase = Callable[[str], AbstractContextManager[object]]


def _is_scored(row: BatchRow) -> bool:
    """Whether all trained tokens have finite scores. Tokens of an environment are only context."""
    on = row.trajectory.loss_mask > 0
    scores = (row.old_log_probs, row.ref_log_probs, row.values)
    return all(bool(np.isfinite(s[on]).all()) for s in scores if s is not None)


@dataclass
class Learned:
    """What one local update did."""

    sums: UpdateSums
    optimizer_steps: int
    """Mini-batches that the policy's optimizer was offered."""
    stepped: int
    """Steps it took."""
    critic_stepped: int = 0
    """Steps that the critic's optimizer took."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Sample id -> why it must not count as trained."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Run log keys of critic and reference, over all ranks."""
    advantages: dict[str, list[float]] = field(default_factory=dict)
    """Sample id -> mean advantage of each trajectory's trained tokens; of this rank's samples."""


class Learner:
    """Policy, critic and reference of this rank. Every method is collective."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        load_algorithms(config)
        self._config = config
        self._ranks = ranks
        self.model = load_policy(config, ranks)
        self.policy: Learnable = learnable(self.model, config.actor.optim, config.optimizer_steps)
        self._updater = Updater(config, self.policy, ranks)
        self._critic: Critic | None = None
        if config.critic.enable:
            self._critic = Critic(config, ranks)
        self._reference: Reference | None = None
        if config.uses_reference:
            self._reference = Reference(config, ranks)
        self.kl_coef = config.algorithm.kl_ctrl.kl_coef
        self._updates = 0

    @property
    def parts(self) -> dict[str, Learnable]:
        """Everything that a checkpoint must contain."""
        found = {"policy": self.policy}
        if self._critic is not None:
            found["critic"] = self._critic.part
        return found

    @property
    def adapted_kl_coef(self) -> float | None:
        """The adaptive controller's present coefficient; None if the configuration fixes it."""
        a = self._config.algorithm
        return self.kl_coef if a.use_kl_in_reward and a.kl_ctrl.type == "adaptive" else None

    def is_stuck(self, learned: Learned) -> bool:
        """Whether a model that should have learned from this update took no step at all."""
        policy = learned.optimizer_steps > 0 and not learned.stepped
        return policy or (self._critic is not None and not learned.critic_stepped)

    def resumed(self, updates: int, kl_coef: float | None) -> None:
        """Restore what a checkpoint holds besides the models."""
        self._updates = updates
        if kl_coef is not None and self.adapted_kl_coef is not None:
            self.kl_coef = kl_coef

    def begin_window(self) -> None:
        """Begin a window: the live parameters equal the snapshot just written."""
        self._updater.begin_window()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a canary; the same `token_ids` on all ranks."""
        return self._updater.score(token_ids)

    def learn(
        self,
        mini_batches: Sequence[Sequence[Sample]],
        step_of_version: dict[str, int],
        optimizer_steps: int,
        phase: Phase,
    ) -> Learned:
        """Train this rank's part of R mini-batches. `optimizer_steps`: how many there were before."""
        proximal = self._config.actor.prox_logp_method != "recompute"
        rows = make_rows(mini_batches, step_of_version if proximal else None)
        every = [row for mini in rows for row in mini]
        with phase("old_log_prob"):
            self._updater.recompute_old(rows)
        if self._reference is not None:
            with phase("ref"):
                self._reference.score(every)
        if self._critic is not None:
            with phase("values"):
                self._critic.score(every)
        learned = Learned(UpdateSums(), 0, 0)
        self._updates += 1
        with phase("adv"):
            rows = self._leave_out_broken(rows, learned)
            if not self._ranks.largest(sum(map(len, rows))):
                learned.optimizer_steps = len(rows)  # attempted; none was taken
                learned.sums.skipped = len(rows)
                return learned
            kl = fill_advantages(self._config, rows, self._ranks, self.kl_coef)
            learned.advantages = mean_advantages(rows)
        if self._critic is None or self._updates > self._config.critic.warmup_updates:
            with phase("update_actor"):
                for mini in rows:
                    self._step_policy(mini, learned, optimizer_steps + learned.optimizer_steps)
        if self._critic is not None:
            with phase("update_critic"):
                self._train_critic(self._critic, rows, learned)
        self._control_kl(kl, learned)
        return learned

    def _leave_out_broken(self, rows: list[list[BatchRow]], learned: Learned) -> list[list[BatchRow]]:
        """Leave out samples that could not be scored: whitening would spread their nan to all others."""
        if not (self._config.recomputes_old or self._reference is not None or self._critic is not None):
            return rows
        own = sorted({row.prompt.sample_id for mini in rows for row in mini if not _is_scored(row)})
        bad = {i for part in self._ranks.gather_all(own) for i in part}
        learned.rejected.update(dict.fromkeys(bad, "log-probs, reference or values are not finite"))
        if bad:
            log.error("scores are not finite", extra={"offenders": sorted(bad)})
        return [[row for row in mini if row.prompt.sample_id not in bad] for mini in rows]

    def _step_policy(self, mini: Sequence[BatchRow], learned: Learned, steps_before: int) -> None:
        """Take a step. Retry once without samples that were not finite, so that the others are not lost."""
        sums = learned.sums
        known = len(sums.offenders)
        learned.optimizer_steps += 1
        if not self._ranks.largest(len(mini)):
            sums.skipped += 1  # no sample of it could be scored
            return
        if self._updater.step(mini, sums, steps_before):
            learned.stepped += 1
            return
        bad = set(sums.offenders[known:])
        learned.rejected.update(dict.fromkeys(bad, "log-probs, advantage or loss are not finite"))
        rest = [row for row in mini if row.prompt.sample_id not in bad]
        if bad and self._ranks.largest(len(rest)) and self._updater.step(rest, sums, steps_before):
            learned.stepped += 1

    def _train_critic(self, critic: Critic, rows: Sequence[Sequence[BatchRow]], learned: Learned) -> None:
        sums = ValueSums()
        for mini in rows:
            kept = [row for row in mini if row.prompt.sample_id not in learned.rejected]
            if self._ranks.largest(len(kept)):
                learned.critic_stepped += critic.step(kept, sums)
        learned.metrics |= value_metrics(sums, self._ranks, critic.part.learning_rate)

    def _control_kl(self, kl: BatchKl | None, learned: Learned) -> None:
        if kl is None:
            return
        learned.metrics |= {
            row_keys.ACTOR_REWARD_KL_PENALTY: kl.mean,
            row_keys.ACTOR_REWARD_KL_PENALTY_COEFF: self.kl_coef,
        }
        c = self._config.algorithm.kl_ctrl
        if c.type == "adaptive":
            controller = AdaptiveKl(self.kl_coef, c.target_kl, c.horizon)
            self.kl_coef = controller.updated(kl.mean, kl.trajectories).beta
