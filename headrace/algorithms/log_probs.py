"""Log-probabilities of given tokens, and entropy, from logits."""

from __future__ import annotations

import torch


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
