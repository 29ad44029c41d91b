"""Policy losses per token, and their aggregation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated."""


@dataclass(frozen=True)
class PolicyLoss:
    """`loss`: summed over the mask, not yet divided. The other sums are for metrics, without gradient."""

    loss: torch.Tensor
    clipped: torch.Tensor
    clipped_lower: torch.Tensor
    kl: torch.Tensor


def ppo_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
) -> PolicyLoss:
    """PPO's clipped loss with clip-higher (DAPO, arXiv 2503.14476) and the dual clip (arXiv 1912.09729).

    All tensors have one shape; `mask` is 1 where a token counts. Per token, with ratio rho:
    max(-A*rho, -A*clip(rho, 1-low, 1+high)), and for A < 0 no more than -c*A.
    """
    log_ratio = torch.clamp(log_probs - old_log_probs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    upper = torch.maximum(plain, clipped)
    bounded = torch.minimum(upper, -advantages * clip_c)
    negative = advantages < 0
    per_token = torch.where(negative, bounded, upper)
    on = mask > 0
    with torch.no_grad():
        was_clipped = ((clipped > plain) & on).sum()
        was_lower = ((upper > bounded) & negative & on).sum()
        kl = torch.where(on, -log_ratio, 0.0).sum()
    # `where`, not a product: what lies outside the mask may be infinite, and inf * 0 is nan.
    return PolicyLoss(torch.where(on, per_token, 0.0).sum(), was_clipped, was_lower, kl)


def token_mean_scale(global_tokens: float, data_parallel_size: int) -> float:
    """Factor for a rank's summed loss so that the averaged gradient is that of the global token mean.

    FSDP2 averages gradients over ranks, so each rank's sum counts data_parallel_size / global_tokens.
    """
    return data_parallel_size / max(global_tokens, 1.0)


def ess_ratio(log_weights: torch.Tensor) -> torch.Tensor:
    """Effective sample size over sample count of untruncated weights: (sum w)^2 / (N * sum w^2)."""
    if log_weights.numel() == 0:
        return torch.ones(())
    shifted = log_weights - log_weights.max()
    w = shifted.exp()
    return w.sum() ** 2 / (w.numel() * (w * w).sum())
