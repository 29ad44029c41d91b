"""One optimizer step: loss over a mini-batch, backward in micro-batches, clip, step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.algorithm_names import LOSS_SETTINGS
from headrace.algorithms.aggregation import Denominators, aggregate
from headrace.algorithms.decoupled import BehaviourFilter
from headrace.algorithms.entropy import token_entropy
from headrace.algorithms.log_probs import token_log_probs
from headrace.algorithms.losses import LOG_RATIO_LIMIT
from headrace.algorithms.policy_loss import (
    PolicyLossInput,
    PolicyLossSettings,
    TokenLosses,
    policy_loss,
    recommended_aggregation,
)
from headrace.algorithms.registry import load_module
from headrace.algorithms.rollout_correction import RolloutCorrectionConfig, correct_rollout
from headrace.config import ActorConfig, RunConfig
from headrace_trainer.plan import micro_batches
from headrace_trainer.ranks import Ranks
from headrace_trainer.rows import Row, Rows, pad_rows
from headrace_trainer.window_start import WindowStart, reshard

log = logging.getLogger("headrace.trainer.update")


def build_optimizer(
    config: ActorConfig, model: torch.nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    o = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, o.lr_warmup_steps))
    )
    return optimizer, warm_up


def loss_settings(actor: ActorConfig) -> PolicyLossSettings:
    """The numbers of the configured loss; what no loss of ours knows goes to `extra`, for a user's own."""
    numbers: dict[str, Any] = {k: v for k, v in actor.policy_loss_settings.items() if k in LOSS_SETTINGS}
    extra = {k: v for k, v in actor.policy_loss_settings.items() if k not in LOSS_SETTINGS}
    cap = actor.behaviour_weight_cap
    bounds = BehaviourFilter(upper=cap, action=actor.behaviour_weight_action) if cap is not None else None
    return PolicyLossSettings(
        behaviour_filter=bounds,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        extra=extra,
        **numbers,
    )


@dataclass
class UpdateSums:
    """Sums over tokens of this rank, for the metrics of one local update."""

    tokens: float = 0.0
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
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def vector(self) -> list[float]:
        return [
            self.tokens,
            self.loss,
            self.clipped,
            self.clipped_lower,
            self.kl,
            self.k3,
            self.entropy,
            self.weight,
            self.weight_squared,
            self.old_kl,
        ]


class Updater:
    def __init__(
        self,
        config: RunConfig,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        ranks: Ranks,
        pad_id: int,
    ) -> None:
        self._config = config
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self._ranks = ranks
        self._pad_id = pad_id
        for module in config.algorithm.modules:
            load_module(module)
        actor = config.actor
        self._aggregation = actor.loss_agg_mode or recommended_aggregation(actor.policy_loss)
        self._settings = loss_settings(actor)
        c = config.algorithm.rollout_correction
        self._correction = RolloutCorrectionConfig(
            rollout_is=c.rollout_is,
            rollout_is_threshold=c.rollout_is_threshold,
            rollout_rs=c.rollout_rs,
            rollout_rs_threshold=c.rollout_rs_threshold,
            rollout_token_veto_threshold=c.rollout_token_veto_threshold,
        )
        self._corrects = any((c.rollout_is, c.rollout_rs, c.rollout_token_veto_threshold))
        self._window_start = None if config.async_training.use_rollout_log_probs else WindowStart(model)

    def begin_window(self) -> None:
        """The live parameters are those of the snapshot that was just written."""
        if self._window_start is not None:
            self._window_start.remember()

    def recompute_old(self, mini_batches: Sequence[Sequence[Row]]) -> None:
        """Give every row its log-probs under the weights at the start of the window; all ranks together."""
        if self._window_start is None:
            return
        rows = [row for mini in mini_batches for row in mini]
        cuts = self._cut(rows)
        with self._window_start.swapped_in():
            for index in range(self._ranks.largest(len(cuts))):
                if index >= len(cuts):
                    self._forward_nothing()
                    continue
                chosen = [rows[i] for i in cuts[index]]
                batch = pad_rows(chosen, self._pad_id, self._ranks.device)
                logits = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
                log_probs, _ = token_log_probs(logits, batch.targets, batch.temperature)
                for number, row in enumerate(chosen):
                    row.old_log_probs = log_probs[number, row.span].float().cpu().numpy()

    def _cut(self, rows: Sequence[Row]) -> list[list[int]]:
        return micro_batches([row.tokens for row in rows], self._config.actor.ppo_max_token_len_per_gpu)

    def _forward_nothing(self) -> torch.Tensor:
        """Take part in the collectives of a forward pass."""
        ids = torch.full((1, 2), self._pad_id, dtype=torch.int64, device=self._ranks.device)
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return logits

    def step(self, rows: Sequence[Row], sums: UpdateSums) -> bool:
        """One optimizer step over this rank's `rows` of a mini-batch; all ranks together.

        False when the gradient was not finite: the step is skipped, on every rank alike.
        """
        cuts = self._cut(rows)
        counts = [int(row.trajectory.loss_mask.sum()) for row in rows]
        tokens, sequences = self._ranks.sums([float(sum(counts)), float(sum(n > 0 for n in counts))])
        # Equal numbers of micro-batches on all ranks, or the collectives inside them would hang.
        count = self._ranks.largest(len(cuts))
        horizon = float(self._config.data.max_response_length)
        whole = Denominators(tokens, sequences, horizon, self._ranks.world_size)
        self.optimizer.zero_grad(set_to_none=True)
        for index in range(count):
            if index < len(cuts):
                self._micro_batch([rows[i] for i in cuts[index]], whole, sums)
            else:
                (self._forward_nothing().float().sum() * 0.0).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.actor.optim.grad_clip)
        total = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        sums.grad_norms.append(total)
        if not math.isfinite(total):
            sums.skipped += 1
            self.optimizer.zero_grad(set_to_none=True)
            log.error("gradient is not finite, step skipped", extra={"grad_norm": total})
            return False
        self.optimizer.step()
        self.schedule.step()
        if self._window_start is not None:
            self._window_start.is_current = False
        return True

    def _micro_batch(self, rows: Sequence[Row], whole: Denominators, sums: UpdateSums) -> None:
        batch = pad_rows(rows, self._pad_id, self._ranks.device)
        logits = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        log_probs, entropy = token_log_probs(logits, batch.targets, batch.temperature)
        actor = self._config.actor
        mask, weights = batch.mask, None
        if self._corrects:
            corrected = correct_rollout(
                batch.old_log_probs, batch.behaviour_log_probs, batch.mask, self._correction
            )
            mask, weights = corrected.mask, corrected.weights
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
        # Divided by the original counts: what a loss rejects must not make the rest weigh more.
        loss = aggregate(self._aggregation, losses.per_token, losses.mask, whole)
        if actor.entropy_coeff:
            scaled = logits.float() / batch.temperature[:, None, None]
            bonus = aggregate(self._aggregation, token_entropy(scaled, batch.mask), batch.mask, whole)
            loss = loss - actor.entropy_coeff * bonus
        loss.backward()
        self._count(batch, log_probs.detach(), entropy, losses, sums)

    def _count(
        self,
        batch: Rows,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        losses: TokenLosses,
        sums: UpdateSums,
    ) -> None:
        on = batch.mask > 0
        none = torch.zeros(())
        sums.tokens += float(on.sum())
        sums.loss += float(losses.per_token.detach().sum())
        sums.clipped += float(losses.metrics.get("clip_fraction", none).sum())
        sums.clipped_lower += float(losses.metrics.get("clip_fraction_lower", none).sum())
        sums.entropy += float(entropy[on].sum())
        log_ratio = (log_probs - batch.behaviour_log_probs)[on].double()
        log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        weights = log_ratio.exp()
        sums.kl += float(-log_ratio.sum())
        sums.old_kl += float((batch.old_log_probs - log_probs)[on].double().sum())
        sums.k3 += float((weights - 1 - log_ratio).sum())
        sums.weight += float(weights.sum())
        sums.weight_squared += float((weights * weights).sum())

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(ids[i+1] | ids[:i+1]) at temperature 1, for every i; all ranks together, same `token_ids`."""
        ids = torch.tensor([list(token_ids)], device=self._ranks.device)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
            log_probs, _ = token_log_probs(logits, ids[:, 1:], torch.ones(1, device=self._ranks.device))
        reshard(self.model)  # the snapshot wants shards
        return [float(x) for x in log_probs[0]]
