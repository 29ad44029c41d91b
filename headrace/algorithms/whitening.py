"""Whitening: zero mean and unit variance over the tokens of a mask."""

from __future__ import annotations

import torch

from headrace.algorithms.masked import masked_max, masked_mean, masked_min, masked_var, zero_outside

WHITEN_EPS = 1e-8


def whiten(x: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """(x - m) * rsqrt(var + 1e-8), with the unbiased variance over the mask; plus m when not `shift_mean`.

    x, mask: (B, T). Returns (B, T), 0 outside the mask. Equal values have no spread: they give exactly 0
    (m when not `shift_mean`), whereas rounding times rsqrt(1e-8) would be noise. Whiten the whole batch
    before it is cut into mini-batches: the statistics are those of what is passed.
    """
    on = mask > 0
    mean = masked_mean(x, mask)
    spread = masked_max(x, mask) > masked_min(x, mask)
    centred = zero_outside(x - mean, on & spread)
    scaled = centred * torch.rsqrt(masked_var(x, mask) + WHITEN_EPS)
    return scaled if shift_mean else zero_outside(scaled + mean, on)
