"""The frozen policy that the KL divergence refers to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.config import RunConfig
from headrace.models.token_scores import TokenScores
from headrace_trainer.policy import causal_lm
from headrace_trainer.ranks import Ranks
from headrace_trainer.rows import Row, in_micro_batches, pack_rows
from headrace_trainer.sharding import reshard, shard


class Reference:
    """Holds its shards in the compute dtype: nothing ever trains them."""

    def __init__(self, config: RunConfig, model: torch.nn.Module, ranks: Ranks) -> None:
        self._limit = config.actor.ppo_max_token_len_per_gpu
        self._ranks = ranks
        model.requires_grad_(False)
        self.model = shard(model, config.model.dtype, ranks, config.ref.param_offload)

    def score(self, rows: Sequence[Row]) -> None:
        """Give every row its log-probs under the reference; all ranks together."""
        with torch.no_grad():
            for chosen in in_micro_batches(rows, self._limit, self._ranks):
                batch = pack_rows(chosen, self._ranks.device)
                scores: TokenScores = self.model(batch.packed, batch.question)
                for row, log_probs in zip(chosen, batch.by_row(scores.log_probs), strict=False):
                    row.ref_log_probs = log_probs
        reshard(self.model)


def load_reference(config: RunConfig) -> torch.nn.Module:
    """`ref.path`, or the policy before training, in the compute dtype."""
    return causal_lm(config, config.ref.path or config.model.path, getattr(torch, config.model.dtype))
