"""One optimizer step: loss over a mini-batch, backward in micro-batches, clip, step."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.algorithms.aggregation import Denominators, aggregate
from headrace.algorithms.decoupled import BehaviourFilter, approximate_proximal
from headrace.algorithms.kl import kl_penalty
from headrace.algorithms.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInput,
    PolicyLossSettings,
    TokenLosses,
    policy_loss,
)
from headrace.algorithms.registries import LOSS_SETTINGS
from headrace.algorithms.rollout_correction import RolloutCorrectionConfig, correct_rollout
from headrace.config.algorithm import ActorConfig
from headrace.config.run import RunConfig
from headrace.models.packed_model import pack
from headrace.models.token_scores import Question, TokenScores
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.window_start import WindowStart
from headrace_trainer.model.optimize import Learnable
from headrace_trainer.model.rows import BatchRow, MicroBatch, in_micro_batches, pack_rows
from headrace_trainer.model.sharding import reshard
from headrace_trainer.model.sums import TokenSums, denominators

log = logging.getLogger("headrace.trainer.update")


_WEIGHT_LIMIT = 300.0
"""Of log-ratios in metrics: squared weights still fit into a float64."""


def loss_settings(actor: ActorConfig, correction: RolloutCorrectionConfig) -> PolicyLossSettings:
    """Settings of the configured loss. Keys that no shipped loss knows go to `extra`, for a user's loss."""
    numbers: dict[str, Any] = {k: v for k, v in actor.policy_loss_settings.items() if k in LOSS_SETTINGS}
    extra = {k: v for k, v in actor.policy_loss_settings.items() if k not in LOSS_SETTINGS}
    cap = actor.behaviour_weight_cap
    bounds = BehaviourFilter(upper=cap, action=actor.behaviour_weight_action) if cap is not None else None
    return PolicyLossSettings(
        behaviour_filter=bounds,
        rollout_correction=correction,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        extra=extra,
        **numbers,
    )


@dataclass
class UpdateSums(TokenSums):
    """Sums over the policy's tokens for the metrics of one local update."""

    loss: float = 0.0
    clipped: float = 0.0
    clipped_lower: float = 0.0
    kl: float = 0.0
    """Of the behaviour policy to the current one."""
    old_kl: float = 0.0
    """Of the old policy, the one that the ratio refers to."""
    k3: float = 0.0
    entropy: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    reference_kl: float = 0.0
    """Of the current policy to the reference, as the loss estimates it."""
    masked: float = 0.0
    """Tokens that the loss or the rollout correction left out."""
    truncated: float = 0.0
    """Tokens times the share of the importance weights that truncation bounded."""
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    offenders: list[str] = field(default_factory=list)
    """Samples, of all ranks, whose log-probs, advantages or losses were not finite."""


class Updater:
    def __init__(
        self,
        config: RunConfig,
        part: Learnable,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._part = part
        self._model = part.model
        self._ranks = ranks
        actor, loss = config.actor, POLICY_LOSSES.get(config.actor.policy_loss)
        self._aggregation = actor.loss_agg_mode or loss.aggregation
        c = config.algorithm.rollout_correction
        self._correction = RolloutCorrectionConfig(
            rollout_is=c.rollout_is,
            rollout_is_threshold=c.rollout_is_threshold,
            rollout_rs=c.rollout_rs,
            rollout_rs_threshold=c.rollout_rs_threshold,
            rollout_token_veto_threshold=c.rollout_token_veto_threshold,
        )
        self._settings = loss_settings(actor, self._correction)
        self._corrects = c.is_set and not loss.corrects_rollout
        self._window_start = WindowStart(part.model) if config.recomputes_old else None

    def begin_window(self) -> None:
        """Begin a window: the live parameters equal the snapshot just written."""
        if self._window_start is not None:
            self._window_start.remember()

    def _scores(
        self, batch: MicroBatch, entropy_gradient: bool = False, sum_pi_squared: bool = False
    ) -> TokenScores:
        question = dataclasses.replace(
            batch.question, entropy_gradient=entropy_gradient, sum_pi_squared=sum_pi_squared
        )
        found: TokenScores = self._model(batch.packed, question)
        return found

    def _micro_batches(self, rows: Sequence[BatchRow]) -> Iterator[tuple[list[BatchRow], MicroBatch]]:
        """Cut `rows` into micro-batches that fit, the same number on all ranks."""
        for chosen in in_micro_batches(rows, self._config.actor.ppo_max_token_len_per_gpu, self._ranks):
            yield chosen, pack_rows(chosen, self._ranks.device, self._part.dtype)

    def recompute_old(self, mini_batches: Sequence[Sequence[BatchRow]]) -> None:
        """Give every row its log-probs under the weights at the start of the window; all ranks together."""
        if self._window_start is None:
            return
        squares = self._config.estimator.sum_pi_squared
        rows = [row for mini in mini_batches for row in mini]
        with self._window_start.swapped_in():
            for chosen, batch in self._micro_batches(rows):
                scores = self._scores(batch, sum_pi_squared=squares)
                for row, log_probs in zip(chosen, batch.by_row(scores.log_probs), strict=False):
                    row.old_log_probs = log_probs
                if squares:
                    for row, sums in zip(chosen, batch.by_row(scores.sum_pi_squared), strict=False):
                        row.sum_pi_squared = sums

    def step(self, rows: Sequence[BatchRow], sums: UpdateSums, optimizer_steps: int = 0) -> bool:
        """One optimizer step over this rank's `rows` of a mini-batch; all ranks together.

        `optimizer_steps`: number of steps so far. Returns False when something was not finite: every rank
        skips the step, and `sums.offenders` names the samples that caused it.
        """
        whole = denominators(rows, self._config.data.max_response_length, self._ranks)
        self._part.optimizer.zero_grad(set_to_none=True)
        found = UpdateSums()  # discarded if the step is skipped
        offenders: list[str] = []
        for chosen, batch in self._micro_batches(rows):
            offenders += self._micro_batch(chosen, batch, whole, found, optimizer_steps)
        norm = self._part.apply_gradients(self._config.actor.optim.grad_clip)
        sums.grad_norms.append(norm)
        if not math.isfinite(norm):
            sums.skipped += 1
            named = sorted({i for part in self._ranks.gather_all(offenders) for i in part})
            sums.offenders += named
            mini = sorted({row.prompt.sample_id for row in rows})
            log.error(
                "not finite, step skipped",
                extra={"grad_norm": norm, "offenders": named, "samples_of_this_rank": mini},
            )
            return False
        sums.add(found)
        if self._window_start is not None:
            self._window_start.is_current = False
        return True

    def _micro_batch(
        self,
        rows: Sequence[BatchRow],
        batch: MicroBatch,
        whole: Denominators,
        sums: UpdateSums,
        optimizer_steps: int,
    ) -> list[str]:
        """Forward and backward. Returns the samples with a non-finite value."""
        actor = self._config.actor
        scores = self._scores(batch, entropy_gradient=bool(actor.entropy_coeff))
        log_probs, entropy = batch.on_grid(scores.log_probs), batch.on_grid(scores.entropy)
        mask, weights = batch.mask, None
        if actor.prox_logp_method != "recompute":
            batch.old_log_probs = approximate_proximal(
                batch.behaviour_log_probs,
                log_probs,
                batch.behaviour_steps,
                optimizer_steps,
                actor.prox_logp_method,
            )
        if self._corrects:
            # If the engine's log-probs serve as the old ones, the mismatch is that of the current log-probs.
            same = not self._config.recomputes_old and actor.prox_logp_method == "recompute"
            trainer = log_probs.detach() if same else batch.old_log_probs
            corrected = correct_rollout(trainer, batch.behaviour_log_probs, batch.mask, self._correction)
            mask, weights = corrected.mask, corrected.weights
            high = corrected.metrics.get("rollout_is_ratio_fraction_high", torch.zeros(()))
            sums.truncated += float(corrected.metrics.get("rollout_is_oob_ratio", high) * batch.mask.sum())
        losses = policy_loss(
            actor.policy_loss,
            PolicyLossInput(
                log_probs,
                batch.old_log_probs,
                batch.advantages,
                mask,
                behaviour_log_probs=batch.behaviour_log_probs,
                importance_weights=weights,
                settings=self._settings,
            ),
        )
        # Divide by the original counts: tokens that a loss rejects must not make the rest weigh more.
        loss = aggregate(self._aggregation, losses.per_token, losses.mask, whole)
        if actor.entropy_coeff:
            bonus = aggregate(self._aggregation, entropy, batch.mask, whole)
            loss = loss - actor.entropy_coeff * bonus
        finite = (
            torch.isfinite(losses.per_token) & torch.isfinite(log_probs) & torch.isfinite(batch.advantages)
        )
        if actor.use_kl_loss:
            kl = kl_penalty(actor.kl_loss_type, log_probs, batch.ref_log_probs, batch.mask)
            loss = loss + actor.kl_loss_coef * aggregate(self._aggregation, kl, batch.mask, whole)
            sums.reference_kl += float(kl.detach().sum())
            finite &= torch.isfinite(kl)
        bad = (~finite & (batch.mask > 0)).any(-1)[: len(rows)]
        offenders = [row.prompt.sample_id for row, is_bad in zip(rows, bad.tolist(), strict=True) if is_bad]
        if offenders:
            loss = loss * math.nan  # reaches every rank through the norm, even if a clamp hid the cause
        loss.backward()
        self._count(batch, log_probs.detach(), entropy.detach(), losses, sums)
        return offenders

    def _count(
        self,
        batch: MicroBatch,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        losses: TokenLosses,
        sums: UpdateSums,
    ) -> None:
        on = batch.mask > 0
        none = torch.zeros(())
        sums.tokens += float(on.sum())
        sums.loss += float(losses.per_token.detach().sum())
        sums.masked += float((on & ~(losses.mask > 0)).sum())
        sums.clipped += float(losses.metrics.get("clip_fraction", none).sum())
        sums.clipped_lower += float(losses.metrics.get("clip_fraction_lower", none).sum())
        sums.entropy += float(entropy[on].sum())
        # Without the losses' clamp: it would make collapsed weights equal and hide the collapse from the ESS.
        log_ratio = (log_probs - batch.behaviour_log_probs)[on].double()
        log_ratio = log_ratio.clamp(-_WEIGHT_LIMIT, _WEIGHT_LIMIT)
        weights = log_ratio.exp()
        sums.kl += float(-log_ratio.sum())
        sums.old_kl += float((batch.old_log_probs - log_probs)[on].double().sum())
        sums.k3 += float((weights - 1 - log_ratio).sum())
        sums.weight += float(weights.sum())
        sums.weight_squared += float((weights * weights).sum())

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(ids[i+1] | ids[:i+1]) at temperature 1, for every i; all ranks together, same `token_ids`."""
        ids = torch.tensor(list(token_ids))
        where = torch.arange(len(ids) - 1, device=self._ranks.device)
        row = pack([ids], self._ranks.device)
        question = Question(where, row.input_ids[0, 1:], torch.ones_like(where, dtype=torch.float32))
        with torch.no_grad():
            log_probs = self._model(row, question).log_probs
        reshard(self._model)  # the snapshot wants shards
        return [float(x) for x in log_probs]
