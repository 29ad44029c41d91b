"""The token selection of M2PO."""

from __future__ import annotations

import torch


def second_moment_mask(
    behaviour_log_probs: torch.Tensor, proximal_log_probs: torch.Tensor, mask: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Mask without the largest (behaviour - proximal)^2, as few as bring the mean under `threshold`.

    arXiv 2510.01161. All (B, T). Returns (B, T) bool. At least one token stays, even above the threshold.
    """
    on = mask > 0
    squares = (behaviour_log_probs - proximal_log_probs).detach()[on].square()
    if not squares.numel():
        return on
    ascending, order = squares.sort(stable=True)
    counts = torch.arange(1, len(ascending) + 1, device=squares.device)
    under = torch.nonzero(ascending.cumsum(0) / counts < threshold)
    kept = int(under.max()) + 1 if under.numel() else 1
    flags = torch.zeros_like(squares, dtype=torch.bool)
    flags[order[:kept]] = True
    return torch.zeros_like(on).masked_scatter(on, flags)
