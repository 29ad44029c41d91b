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
    """log p(token) and entropy (no gradient) under softmax(logits / temperature).

    logits: (B, T, V); token_ids: (B, T), the token that each position predicts; temperature: (B,),
    the one that sampled. Computed in float32. Returns two tensors (B, T).
    """
    scaled = logits.float() / temperature[:, None, None].float()
    normaliser = torch.logsumexp(scaled, dim=-1)
    picked = scaled.gather(-1, token_ids[..., None]).squeeze(-1)
    with torch.no_grad():
        p = torch.softmax(scaled, dim=-1)
        entropy = normaliser - (p * scaled).sum(-1)
    return picked - normaliser, entropy
