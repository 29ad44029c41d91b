"""The value model of gae and tppo: scoring a batch, and learning from its returns."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.algorithms.aggregation import aggregate
from headrace.algorithms.value_loss import clipped_value_loss
from headrace.config.run import RunConfig
from headrace.metrics import row_keys
from headrace.models.checkpoint_format import names_in_checkpoint
from headrace.models.packed_model import PackedRow, attend_packed
from headrace.models.token_scores import Question
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.optimize import Learnable, learnable
from headrace_trainer.model.policy import recomputes
from headrace_trainer.model.rows import BatchRow, in_micro_batches, pack_rows
from headrace_trainer.model.sharded_loading import allocate, fill, without_weights
from headrace_trainer.model.sharding import reshard, shard
from headrace_trainer.model.sums import TokenSums, denominators

log = logging.getLogger("headrace.trainer.critic")


class ValueModel(torch.nn.Module):
    """A language model's backbone with one number per position instead of logits."""

    def __init__(self, backbone: torch.nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = torch.nn.Linear(hidden_size, 1, bias=False)
        # Start at zero: the first advantages come from returns alone, not from noise.
        torch.nn.init.zeros_(self.value_head.weight)

    def forward(self, row: PackedRow, question: Question) -> torch.Tensor:
        """(N,) values of the states in which the question's tokens are chosen."""
        hidden = row.states(self.backbone)[question.positions]
        value: torch.Tensor = self.value_head(hidden).sum(-1)  # of one element: FSDP warns of views
        return value.to(torch.promote_types(torch.float32, value.dtype))


def value_model(config: RunConfig) -> ValueModel:
    """The model with float32 master weights; backbone as in `critic.path` or the policy, not yet loaded."""
    from transformers import AutoConfig, AutoModel

    heartbeat.beat(heartbeat.LONG_S)
    trust = config.model.trust_remote_code
    settings = AutoConfig.from_pretrained(config.critic.path or config.model.path, trust_remote_code=trust)
    with without_weights():
        backbone = AutoModel.from_config(settings, dtype=torch.float32, trust_remote_code=trust)
    backbone.config.use_cache = False
    attend_packed(backbone)
    return ValueModel(backbone, int(backbone.config.hidden_size))


@dataclass
class ValueSums(TokenSums):
    """Sums over the critic's tokens for the metrics of one local update."""

    loss: float = 0.0
    clipped: float = 0.0
    values: float = 0.0
    squared_error: float = 0.0
    returns: float = 0.0
    squared_returns: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0


class Critic:
    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        model = value_model(config)
        shard(model, config.model.dtype, ranks, recompute=recomputes(config, model))
        allocate(model, ranks.device, ranks.device)
        path = Path(config.critic.path or config.model.path)
        prefix = f"{model.backbone.base_model_prefix}."  # of a language model's files; a backbone's have none
        if not any(name.startswith(prefix) for name in names_in_checkpoint(path)):
            prefix = ""
        fill(model.backbone, path, ranks.device, prefix=prefix)
        self.part: Learnable = learnable(model, config.critic.optim, config.optimizer_steps)

    @property
    def _limit(self) -> int:
        return self._config.actor.ppo_max_token_len_per_gpu

    def score(self, rows: Sequence[BatchRow]) -> None:
        """Give every row the values of its states; all ranks together."""
        model = self.part.model
        with torch.no_grad():
            for chosen in in_micro_batches(rows, self._limit, self._ranks):
                batch = pack_rows(chosen, self._ranks.device)
                found = batch.by_row(model(batch.packed, batch.question))
                for row, values in zip(chosen, found, strict=False):
                    row.values = values
        reshard(model)

    def step(self, rows: Sequence[BatchRow], sums: ValueSums) -> bool:
        """One optimizer step towards the rows' returns; all ranks together. False when it was skipped."""
        c = self._config
        whole = denominators(rows, c.data.max_response_length, self._ranks)
        self.part.optimizer.zero_grad(set_to_none=True)
        for chosen in in_micro_batches(rows, self._limit, self._ranks):
            batch = pack_rows(chosen, self._ranks.device, self.part.dtype)
            values = batch.on_grid(self.part.model(batch.packed, batch.question))
            per_token, clipped = clipped_value_loss(
                values, batch.values, batch.returns, batch.mask, c.critic.cliprange_value
            )
            aggregate(c.critic.loss_agg_mode, per_token, batch.mask, whole).backward()
            on = batch.mask > 0
            known, target = values.detach()[on].double(), batch.returns[on].double()
            sums.tokens += float(on.sum())
            sums.loss += float(per_token.detach().sum())
            sums.clipped += float(clipped[on].sum())
            sums.values += float(known.sum())
            sums.squared_error += float((known - target).square().sum())
            sums.returns += float(target.sum())
            sums.squared_returns += float(target.square().sum())
        norm = self.part.apply_gradients(c.critic.optim.grad_clip)
        sums.grad_norms.append(norm)
        if math.isfinite(norm):
            return True
        sums.skipped += 1
        log.error("the critic's gradient is not finite, step skipped", extra={"grad_norm": norm})
        return False


def value_metrics(sums: ValueSums, ranks: Ranks, learning_rate: float) -> dict[str, float]:
    """Run log keys of the critic's part of an update. Collective."""
    t = sums.over(ranks)
    n = max(t.tokens, 1.0)
    variance = t.squared_returns / n - (t.returns / n) ** 2
    return {
        row_keys.CRITIC_VF_LOSS: t.loss / n,
        row_keys.CRITIC_VF_CLIPFRAC: t.clipped / n,
        row_keys.CRITIC_VALUES_MEAN: t.values / n,
        row_keys.CRITIC_RETURNS_MEAN: t.returns / n,
        row_keys.CRITIC_VF_EXPLAINED_VAR: 1.0 - t.squared_error / n / variance if variance > 1e-12 else 0.0,
        row_keys.CRITIC_GRAD_NORM: sums.grad_norms[-1] if sums.grad_norms else 0.0,
        row_keys.CRITIC_SKIPPED_STEPS: sums.skipped,
        row_keys.CRITIC_LR: learning_rate,
    }
