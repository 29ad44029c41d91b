"""The critic's loss."""

from __future__ import annotations

import torch

from headrace.algorithms.masked import zero_outside


def clipped_value_loss(
    predictions: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2 per token. PPO, arXiv 1707.06347.

    All (B, T). Returns the token losses, 0 outside the mask, and (B, T) bool: where the clip decided.
    """
    on = mask > 0
    v, old, target = (zero_outside(x, on) for x in (predictions, old_values.detach(), returns.detach()))
    near = torch.clamp(v, old - clip, old + clip)
    plain, bounded = (v - target).square(), (near - target).square()
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).detach()
