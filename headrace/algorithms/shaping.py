"""Penalties applied to rewards before advantages are computed."""

from __future__ import annotations

import torch

from headrace.algorithms.masked import zero_outside


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
