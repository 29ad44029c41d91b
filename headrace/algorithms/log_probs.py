"""Log-probabilities of given tokens, and entropy, from logits; log-ratios of two policies."""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated."""


def safe_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Within +-20, so that its exponential stays finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_log_probs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(token) and entropy under softmax(logits / temperature), both with gradient.

    logits: (..., V); token_ids: (...), the token that each position predicts; temperature: (...), the one
    that sampled. Computed in float32, or in the dtype of more precise logits. Returns two tensors (...). A
    logit of -inf is never sampled and adds nothing to the entropy.
    """
    log_p = torch.log_softmax(_scaled(logits, temperature), -1)
    picked = log_p.gather(-1, token_ids[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(torch.isneginf(log_p), 0.0)).sum(-1)
    return picked, entropy


def sum_pi_squared(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Sum over the vocabulary of squared probabilities, shapes as in `token_log_probs`."""
    return torch.softmax(_scaled(logits, temperature), dim=-1).square().sum(-1)


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(torch.float32, logits.dtype)
    return logits.to(dtype) / temperature[..., None].to(dtype)
