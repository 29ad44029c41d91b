"""Sums, means and variances over the tokens of a mask."""

from __future__ import annotations

import torch

COUNT_EPS = 1e-8
"""Added to a count before dividing, so that an empty mask gives 0 instead of nan."""


def zero_outside(x: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """x where `on` is true, else 0. Not a product: inf * 0 would be nan, also in the gradient."""
    return torch.where(on, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of x where mask > 0, over everything or over `dim`."""
    kept = zero_outside(x, mask > 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_count(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Number of tokens of the mask, in x's dtype."""
    on = mask > 0
    return (on.sum() if dim is None else on.sum(dim)).to(x.dtype)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum over the mask / (count + 1e-8); 0 for an empty mask."""
    return masked_sum(x, mask, dim) / (masked_count(x, mask, dim) + COUNT_EPS)


def masked_var(x: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance over the mask, a scalar; with Bessel's correction n / (n - 1) when `unbiased`.

    A mask of fewer than two tokens has none: 0.
    """
    biased = masked_mean((x - masked_mean(x, mask)).square(), mask)
    if not unbiased:
        return biased
    count = masked_count(x, mask)
    return biased * count / (count - 1).clamp_min(1)


def masked_max(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Largest x of the mask; -inf for an empty mask."""
    kept = x.masked_fill(mask <= 0, -torch.inf)
    return kept.max() if dim is None else kept.amax(dim)


def masked_min(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Smallest x of the mask; inf for an empty mask."""
    return -masked_max(-x, mask, dim)
