"""One optimizer step: loss over a mini-batch, backward in micro-batches, clip, step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import FSDPModule

from headrace.algorithms.advantages import grpo
from headrace.algorithms.log_probs import token_log_probs
from headrace.algorithms.losses import LOG_RATIO_LIMIT, ppo_clip, token_mean_scale
from headrace.config import ActorConfig, RunConfig
from headrace.wire import Prompt, Sample, Trajectory
from headrace_trainer.batch import Rows, pad_rows
from headrace_trainer.plan import micro_batches
from headrace_trainer.ranks import Ranks

log = logging.getLogger("headrace.trainer.update")

Row = tuple[Prompt, Trajectory, float]


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


def with_advantages(config: RunConfig, samples: Sequence[Sample]) -> list[Row]:
    """Every trajectory of `samples` with its advantage. A group lies whole on one rank."""
    rows: list[Row] = []
    for sample in samples:
        rewards = torch.tensor([t.reward for t in sample.trajectories], dtype=torch.float64)
        advantages = grpo(rewards, config.algorithm.norm_adv_by_std)
        rows += [(sample.prompt, t, float(a)) for t, a in zip(sample.trajectories, advantages, strict=True)]
    return rows


@dataclass
class UpdateSums:
    """Sums over tokens of this rank, for the metrics of one local update."""

    tokens: float = 0.0
    loss: float = 0.0
    clipped: float = 0.0
    clipped_lower: float = 0.0
    kl: float = 0.0
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

    def step(self, rows: Sequence[Row], sums: UpdateSums) -> bool:
        """One optimizer step over this rank's `rows` of a mini-batch; all ranks together.

        False when the gradient was not finite: the step is skipped, on every rank alike.
        """
        lengths = [len(p.token_ids) + len(t.token_ids) for p, t, _ in rows]
        cuts = micro_batches(lengths, self._config.actor.ppo_max_token_len_per_gpu)
        mine = float(sum(int(t.loss_mask.sum()) for _, t, _ in rows))
        (tokens,) = self._ranks.sums([mine])
        # Equal numbers of micro-batches on all ranks, or the collectives inside them would hang.
        count = self._ranks.largest(len(cuts))
        scale = token_mean_scale(tokens, self._ranks.world_size)
        self.optimizer.zero_grad(set_to_none=True)
        for index in range(count):
            if index < len(cuts):
                self._micro_batch([rows[i] for i in cuts[index]], scale, sums)
            else:
                self._empty_micro_batch()
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
        return True

    def _micro_batch(self, rows: Sequence[Row], scale: float, sums: UpdateSums) -> None:
        batch = pad_rows(rows, self._pad_id, self._ranks.device)
        log_probs, entropy = self._forward(batch)
        actor = self._config.actor
        result = ppo_clip(
            log_probs,
            batch.behaviour_log_probs,
            batch.advantages[:, None].expand_as(log_probs),
            batch.mask,
            actor.clip_ratio_low,
            actor.clip_ratio_high,
            actor.clip_ratio_c,
        )
        (result.loss * scale).backward()
        on = batch.mask > 0
        sums.tokens += float(on.sum())
        sums.loss += float(result.loss.detach())
        sums.clipped += float(result.clipped)
        sums.clipped_lower += float(result.clipped_lower)
        sums.kl += float(result.kl)
        sums.entropy += float(entropy[on].sum())
        log_ratio = (log_probs.detach() - batch.behaviour_log_probs)[on].double()
        log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        weights = log_ratio.exp()
        sums.k3 += float((weights - 1 - log_ratio).sum())
        sums.weight += float(weights.sum())
        sums.weight_squared += float((weights * weights).sum())

    def _empty_micro_batch(self) -> None:
        """Take part in the collectives with a loss of zero."""
        ids = torch.full((1, 2), self._pad_id, dtype=torch.int64, device=self._ranks.device)
        logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        (logits.float().sum() * 0.0).backward()

    def _forward(self, batch: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        return token_log_probs(logits, batch.targets, batch.temperature)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(ids[i+1] | ids[:i+1]) at temperature 1, for every i; all ranks together, same `token_ids`."""
        ids = torch.tensor([list(token_ids)], device=self._ranks.device)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
            log_probs, _ = token_log_probs(logits, ids[:, 1:], torch.ones(1, device=self._ranks.device))
        # Without a backward FSDP leaves the root's parameters gathered; the snapshot wants shards.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return [float(x) for x in log_probs[0]]
