"""The frozen policy that the KL divergence refers to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.algorithms.log_probs import token_log_probs
from headrace.config import RunConfig
from headrace_trainer.policy import causal_lm
from headrace_trainer.ranks import Ranks
from headrace_trainer.rows import Row, in_micro_batches, pad_rows
from headrace_trainer.sharding import reshard, shard


class Reference:
    """Holds its shards in the compute dtype: nothing ever trains them."""

    def __init__(self, config: RunConfig, model: torch.nn.Module, ranks: Ranks, pad_id: int) -> None:
        self._limit = config.actor.ppo_max_token_len_per_gpu
        self._ranks = ranks
        self._pad_id = pad_id
        model.requires_grad_(False)
        self.model = shard(model, config.model.dtype, ranks, config.ref.param_offload)

    def score(self, rows: Sequence[Row]) -> None:
        """Give every row its log-probs under the reference; all ranks together."""
        with torch.no_grad():
            for chosen in in_micro_batches(rows, self._limit, self._ranks):
                batch = pad_rows(chosen, self._pad_id, self._ranks.device)
                logits = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
                log_probs, _ = token_log_probs(logits, batch.targets, batch.temperature)
                for number, row in enumerate(chosen):
                    row.ref_log_probs = log_probs[number, row.span].cpu().numpy()
        reshard(self.model)


def load_reference(config: RunConfig) -> torch.nn.Module:
    """`ref.path`, or the policy before training, in the compute dtype."""
    return causal_lm(config, config.ref.path or config.model.path, getattr(torch, config.model.dtype))
