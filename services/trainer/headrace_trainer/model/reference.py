"""The frozen policy that the KL divergence refers to: `ref.path`, or the policy before training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.config.run import RunConfig
from headrace.models.token_scores import TokenScores
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.policy import causal_lm
from headrace_trainer.model.rows import BatchRow, in_micro_batches, pack_rows
from headrace_trainer.model.sharded_loading import fill
from headrace_trainer.model.sharding import reshard, shard


class Reference:
    """The reference model. Its shards are in the compute dtype, since they are never trained."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self._limit = config.actor.ppo_max_token_len_per_gpu
        self._ranks = ranks
        path = config.ref.path or config.model.path
        self.model = causal_lm(config, path, getattr(torch, config.model.dtype)).requires_grad_(False)
        shard(self.model, config.model.dtype, ranks, config.ref.param_offload)
        fill(self.model, Path(path), ranks.device, offload=config.ref.param_offload)

    def score(self, rows: Sequence[BatchRow]) -> None:
        """Give every row its log-probs under the reference; all ranks together."""
        with torch.no_grad():
            for chosen in in_micro_batches(rows, self._limit, self._ranks):
                batch = pack_rows(chosen, self._ranks.device)
                scores: TokenScores = self.model(batch.packed, batch.question)
                for row, log_probs in zip(chosen, batch.by_row(scores.log_probs), strict=False):
                    row.ref_log_probs = log_probs
        reshard(self.model)
