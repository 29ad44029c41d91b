"""PPO's loss as one sum over a micro-batch, for the trainer's step. The other losses: `policy_loss`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.algorithms.clipped_losses import clipped_surrogate
from headrace.algorithms.importance_weights import effective_sample_size
from headrace.algorithms.log_probs import LOG_RATIO_LIMIT, safe_log_ratio
from headrace.algorithms.masked import zero_outside

__all__ = ["LOG_RATIO_LIMIT", "PolicyLoss", "ess_ratio", "ppo_clip", "token_mean_scale"]


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
    on = mask > 0
    # Zeroed before the subtraction: an infinite log-prob outside the mask would leave a nan gradient.
    log_ratio = safe_log_ratio(zero_outside(log_probs, on) - zero_outside(old_log_probs, on))
    loss, clipped, lower = clipped_surrogate(
        log_ratio.exp(), zero_outside(advantages, on), clip_low, clip_high, clip_c
    )
    return PolicyLoss(
        zero_outside(loss, on).sum(), (clipped & on).sum(), (lower & on).sum(), -log_ratio.detach().sum()
    )


def token_mean_scale(global_tokens: float, data_parallel_size: int) -> float:
    """Factor for a rank's summed loss so that the averaged gradient is that of the global token mean.

    FSDP2 averages gradients over ranks, so each rank's sum counts data_parallel_size / global_tokens.
    """
    return data_parallel_size / max(global_tokens, 1.0)


def ess_ratio(log_weights: torch.Tensor) -> torch.Tensor:
    """Effective sample size over sample count of untruncated weights: (sum w)^2 / (N * sum w^2)."""
    return effective_sample_size(log_weights, torch.ones_like(log_weights))
