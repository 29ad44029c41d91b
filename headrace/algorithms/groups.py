"""Statistics of groups: the trajectories that answer one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupStats:
    """Statistics of each row's group, all (B,). `equal`: all scores of the group are the same number.

    `std` is the unbiased deviation, 0 for a group of one or of equal scores.
    """

    index: torch.Tensor
    size: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    equal: torch.Tensor
    maximum: torch.Tensor


def group_sum(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Sum over each row's group, per row. x: (B,) or (B, T); index: (B,) from `group_stats`."""
    total = x.new_zeros((int(index.max()) + 1, *x.shape[1:])) if index.numel() else x
    return total.index_add(0, index, x)[index]


def group_max(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Maximum over each row's group, per row. x, index: (B,)."""
    if not index.numel():
        return x
    empty = x.new_full((int(index.max()) + 1,), -torch.inf)
    return empty.scatter_reduce(0, index, x, "amax")[index]


def group_stats(scores: torch.Tensor, group_ids: torch.Tensor) -> GroupStats:
    """scores: (B,); group_ids: (B,) int64, any numbers, rows of a group in any order."""
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"one group id per trajectory: {tuple(scores.shape)} scores, {tuple(group_ids.shape)} ids"
        )
    index = torch.unique(group_ids, return_inverse=True)[1]
    size = group_sum(torch.ones_like(scores), index)
    maximum = group_max(scores, index)
    equal = maximum == -group_max(-scores, index)
    mean = torch.where(equal, scores, group_sum(scores, index) / size)
    variance = group_sum((scores - mean).square(), index) / (size - 1).clamp_min(1)
    return GroupStats(index, size, mean, variance.sqrt(), equal, maximum)


def centred(scores: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """r - mean of the group; exactly 0 for equal scores; r itself for a group of one."""
    return torch.where(stats.size > 1, scores - stats.mean, scores)
