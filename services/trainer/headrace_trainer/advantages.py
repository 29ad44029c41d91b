"""Rewards of the whole R*M batch into one advantage per token, on every rank alike.

Advantages and whitening are statistics of the batch, not of the part that a rank happens to hold: the
ranks exchange rewards, lengths and masks, each computes the same advantages in float64, and keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.algorithms.estimator import AdvantageInput, estimate
from headrace.algorithms.shaping import overlong_penalty
from headrace.config import RunConfig
from headrace.wire import Sample
from headrace_trainer.ranks import Ranks
from headrace_trainer.rows import Row


def with_advantages(
    config: RunConfig, mini_batches: Sequence[Sequence[Sample]], ranks: Ranks | None = None
) -> list[list[Row]]:
    """Rows of this rank, per mini-batch. Collective when `ranks` are given."""
    samples = [s for mini in mini_batches for s in mini]
    trajectories = [t for s in samples for t in s.trajectories]
    rows, width = len(trajectories), max((len(t.token_ids) for t in trajectories), default=1)
    # Columns: the group's number on this rank, tokens, reward.
    facts = torch.zeros((rows, 3), dtype=torch.float64)
    mask = torch.zeros((rows, width), dtype=torch.uint8)
    at = 0
    for number, sample in enumerate(samples):
        for t in sample.trajectories:
            facts[at] = torch.tensor([number, len(t.token_ids), t.reward], dtype=torch.float64)
            mask[at, : len(t.token_ids)] = torch.from_numpy(t.loss_mask.copy())
            at += 1
    all_facts = ranks.gather_rows(facts) if ranks is not None else [facts]
    all_masks = ranks.gather_rows(mask) if ranks is not None else [mask]
    rank = ranks.rank if ranks is not None else 0
    first = sum(len(part) for part in all_facts[:rank])
    advantages = _estimate(config, all_facts, torch.cat(all_masks))[first : first + rows]
    out: list[list[Row]] = []
    at = 0
    for mini in mini_batches:
        found: list[Row] = []
        for sample in mini:
            for t in sample.trajectories:
                values = advantages[at, : len(t.token_ids)].numpy().astype(np.float32)
                found.append(Row(sample.prompt, t, values))
                at += 1
        out.append(found)
    return out


def _estimate(config: RunConfig, facts: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """(B, T) float64 over all ranks' rows."""
    groups, offset = [], 0
    for part in facts:
        groups.append(part[:, 0].long() + offset)
        offset += int(part[:, 0].max()) + 1 if len(part) else 0
    every = torch.cat(list(facts))
    lengths, rewards = every[:, 1].long(), every[:, 2]
    a = config.algorithm
    if a.overlong_buffer_len:
        limit = config.data.max_response_length
        penalty = overlong_penalty(lengths, limit, a.overlong_buffer_len, a.overlong_penalty_factor)
        rewards = rewards + penalty.double()
    # The outcome's reward stands on the last token.
    token_rewards = torch.zeros(mask.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(rewards)), lengths - 1] = rewards
    batch = AdvantageInput(
        token_level_rewards=token_rewards,
        response_mask=mask,
        group_ids=torch.cat(groups),
        lengths=lengths,
        norm_by_std=a.norm_adv_by_std,
        gamma=a.gamma,
    )
    return estimate(a.adv_estimator, batch).advantages
