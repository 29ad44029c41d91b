"""Entropy of the policy's token distribution."""

from __future__ import annotations

import torch

from headrace.algorithms.masked import zero_outside


def token_entropy(logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """-sum p * log p of softmax(logits), with gradient. (B, T, V) to (B, T).

    A logit of -inf is never sampled and adds nothing. With a mask (B, T) the entropy outside is 0, and so is
    its gradient, whatever the logits there.
    """
    if mask is not None:
        inside = zero_outside(logits, (mask > 0)[..., None])
        return zero_outside(token_entropy(inside), mask > 0)
    log_p = torch.log_softmax(logits, dim=-1)
    impossible = torch.isneginf(logits)
    return -(log_p.exp() * log_p.masked_fill(impossible, 0.0)).sum(-1)
