"""Decoupled PPO as a policy loss."""

from __future__ import annotations

import torch

from headrace.algorithms.clipped_losses import clipped_surrogate
from headrace.algorithms.decoupled import behaviour_weights
from headrace.algorithms.masked import masked_mean
from headrace.algorithms.policy_loss import (
    PolicyLossInput,
    TokenLosses,
    clamped_log_ratio,
    finish,
)


def decoupled_ppo(inputs: PolicyLossInput) -> TokenLosses:
    """Clipped surrogate of current / proximal, times proximal / behaviour. arXiv 2110.00641, 2505.24298.

    `old_log_probs` are the proximal ones. The weight is bounded by `behaviour_filter`; None means none.
    With `sequence_ratio` the ratio is exp(mean log rho) and the advantage its mean, both over the tokens
    kept, with the full gradient. Divide by the original token count: dropping tokens must not make the
    others heavier.
    """
    s = inputs.settings
    kept, weights = inputs.on, None
    metrics: dict[str, torch.Tensor] = {}
    if s.behaviour_filter is not None:
        bounded = behaviour_weights(inputs.old_log_probs, inputs.behaviour, inputs.mask, s.behaviour_filter)
        kept, weights = bounded.kept, bounded.weights
        metrics["behaviour_weight"] = weights
    log_ratio = clamped_log_ratio(inputs.log_probs, inputs.old_log_probs)
    advantages, effective = inputs.advantages, log_ratio
    if s.sequence_ratio:
        effective = masked_mean(log_ratio, kept, dim=-1)[:, None].expand_as(log_ratio)
        advantages = masked_mean(advantages, kept, dim=-1)[:, None].expand_as(log_ratio)
    loss, clipped, lower = clipped_surrogate(
        effective.exp(), advantages, s.clip_ratio_low, s.clip_ratio_high, s.clip_ratio_c
    )
    if weights is not None:
        loss = loss * weights
    metrics |= {"clip_fraction": clipped, "clip_fraction_lower": lower, "kl": -log_ratio}
    return finish(inputs, loss, metrics, kept)
