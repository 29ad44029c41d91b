"""Advantage estimators: from a group's rewards to one advantage per trajectory."""

from __future__ import annotations

import torch


def grpo(rewards: torch.Tensor, norm_by_std: bool = True, eps: float = 1e-6) -> torch.Tensor:
    """Group-relative advantage of one group.

    rewards: (G,) sum of each trajectory's token rewards. Returns (G,).
    (r - mean) / (std + eps) with the unbiased deviation (GRPO, arXiv 2402.03300); without the
    division it is Dr.GRPO's (arXiv 2503.20783). A group of one gets r. A group of equal rewards gets
    exactly zero: in floating point mean([0.7]*7) is not 0.7, and eps would blow the rest up.
    """
    if rewards.numel() == 1:
        return rewards.clone()
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + eps) if norm_by_std else centred
