"""Rewards before they become advantages: penalties, normalisation, groups without signal."""

from __future__ import annotations

from typing import Literal

import torch

from headrace.algorithms.advantages import leave_one_out
from headrace.algorithms.groups import centred, group_stats
from headrace.algorithms.masked import zero_outside

Level = Literal["group", "batch"] | None


def overlong_penalty(
    lengths: torch.Tensor, max_length: int, buffer: int, factor: float = 1.0
) -> torch.Tensor:
    """DAPO's soft punishment: min(-(len - (max - buffer)) / buffer * factor, 0). arXiv 2503.14476.

    lengths: (B,) response lengths. Returns (B,) floats <= 0, to be added to the reward: 0 up to
    max - buffer, then falling to -factor at max.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer must lie in 1..{max_length} tokens, got {buffer}")
    length = lengths if lengths.is_floating_point() else lengths.to(torch.get_default_dtype())
    excess = length - (max_length - buffer)
    return (-excess / buffer * factor).clamp_max(0.0)


def penalised_rewards(
    token_level_scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, beta: float
) -> torch.Tensor:
    """r_t - beta * kl_t on the mask, r_t elsewhere. All (B, T). KL in the reward, arXiv 2203.02155."""
    return token_level_scores - beta * zero_outside(kl.detach(), mask > 0)


def normalise_rewards(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    mean_level: Level = "group",
    std_level: Level = "group",
    leave_one_out_mean: bool = False,
    unbiased: bool = True,
    eps: float = 1e-5,
) -> torch.Tensor:
    """(r - mean) / (deviation + eps), each over the group, the batch or not at all.

    rewards, group_ids: (B,). With `leave_one_out_mean` the mean is that of the others (of group or batch).
    The batch's deviation is that of the centred rewards, as in AReaL (arXiv 2505.24298). Equal rewards give
    exactly 0; a group of one keeps its reward where the group's mean would be subtracted.
    """
    batch_ids = torch.zeros_like(group_ids)
    relative = rewards
    if mean_level is not None:
        ids = group_ids if mean_level == "group" else batch_ids
        relative = (
            leave_one_out(rewards, ids) if leave_one_out_mean else centred(rewards, group_stats(rewards, ids))
        )
    if std_level is None:
        return relative
    stats = group_stats(rewards, group_ids) if std_level == "group" else group_stats(relative, batch_ids)
    std = stats.std if unbiased else stats.std * ((stats.size - 1) / stats.size).sqrt()
    return torch.where(stats.size > 1, relative / (std + eps), relative)


def has_spread(metric: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """(B,) bool: whether the row's group has differing values of `metric` (B,).

    Dynamic sampling (DAPO, arXiv 2503.14476) drops the groups without, then refills the batch.
    """
    return ~group_stats(metric, group_ids).equal
