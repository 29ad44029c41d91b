"""Policy losses with one ratio per sequence. Aggregate them by seq-mean-token-mean."""

from __future__ import annotations

import torch

from headrace.algorithms.clipped_losses import clipped_surrogate
from headrace.algorithms.masked import masked_mean, zero_outside
from headrace.algorithms.policy_loss import PolicyLossInput, TokenLosses, finish

SEQUENCE_LOG_RATIO_LIMIT = 10.0
WEIGHT_EPS = 1e-10


def gspo(inputs: PolicyLossInput) -> TokenLosses:
    """Clipped surrogate of exp(mean log rho), the mean over the sequence. arXiv 2507.18071.

    The value of a token's ratio is the sequence's, its gradient that of its own lp (GSPO-token): each token
    adds lp - stop_gradient(lp). No dual clip.
    """
    s = inputs.settings
    log_ratio = inputs.log_probs - inputs.old_log_probs
    sequence = masked_mean(log_ratio.detach(), inputs.mask, dim=-1)[:, None]
    per_token = inputs.log_probs - inputs.log_probs.detach() + sequence
    ratio = per_token.clamp_max(SEQUENCE_LOG_RATIO_LIMIT).exp()
    loss, clipped, _ = clipped_surrogate(ratio, inputs.advantages, s.clip_ratio_low, s.clip_ratio_high, None)
    return finish(inputs, loss, {"clip_fraction": clipped, "kl": -log_ratio})


def gmpo(inputs: PolicyLossInput) -> TokenLosses:
    """-mean(A) * exp(mean of the clipped log rho), both over the sequence. arXiv 2507.20673.

    A token's log-ratio is clipped to [-low, high] where that lowers the objective. Every token of a sequence
    carries the sequence's loss. Importance weights enter as their geometric mean.
    """
    s = inputs.settings
    log_ratio = inputs.log_probs - inputs.old_log_probs
    bounded = log_ratio.clamp(-s.clip_ratio_low, s.clip_ratio_high)
    sign = torch.sign(inputs.advantages)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = masked_mean(pessimistic, inputs.mask, dim=-1).exp()
    loss = -masked_mean(inputs.advantages, inputs.mask, dim=-1) * ratio
    if inputs.importance_weights is not None:
        loss = loss * masked_mean((inputs.importance_weights + WEIGHT_EPS).log(), inputs.mask, dim=-1).exp()
    clipped = log_ratio != bounded
    metrics = {
        "clip_fraction": clipped & (inputs.advantages > 0),
        "clip_fraction_lower": clipped & (inputs.advantages < 0),
        "kl": -log_ratio,
    }
    on = inputs.on
    detached = {k: zero_outside(v.detach().to(loss.dtype), on) for k, v in metrics.items()}
    return TokenLosses(zero_outside(loss[:, None].expand_as(on), on), on, detached)
