"""Policy losses of the form -w * A * lp: the weight is a constant, the gradient is that of lp alone."""

from __future__ import annotations

import torch

from headrace.algorithms.policy_loss import (
    PolicyLossInput,
    TokenLosses,
    clamped_log_ratio,
    finish,
)

PROBABILITY_EPS = 1e-8


def gpg(inputs: PolicyLossInput) -> TokenLosses:
    """-A * lp. arXiv 2504.02546."""
    return finish(inputs, -inputs.advantages * inputs.log_probs)


def cispo(inputs: PolicyLossInput) -> TokenLosses:
    """-clip(rho, 1 - low, 1 + high) * A * lp, the clipped ratio without gradient. arXiv 2506.13585.

    Clipping bounds the weight of a token but never takes its gradient away.
    """
    s = inputs.settings
    log_ratio = clamped_log_ratio(inputs.log_probs, inputs.old_log_probs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - s.clip_ratio_low, 1 + s.clip_ratio_high)
    metrics = {"clip_fraction": ratio != weight, "kl": -log_ratio}
    return finish(inputs, -weight * inputs.advantages * inputs.log_probs, metrics)


def aipo(inputs: PolicyLossInput) -> TokenLosses:
    """-min(pi / mu, rho_max) * A * lp, mu the behaviour policy, the weight without gradient.

    arXiv 2505.24034.
    """
    log_ratio = clamped_log_ratio(inputs.log_probs, inputs.behaviour).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp_max(inputs.settings.rho_max)
    metrics = {"clip_fraction": ratio != weight, "kl": -log_ratio}
    return finish(inputs, -weight * inputs.advantages * inputs.log_probs, metrics)


def dro(inputs: PolicyLossInput) -> TokenLosses:
    """-A * lp + beta / 2 * (lp - old)^2. arXiv 2405.19107."""
    log_ratio = inputs.log_probs - inputs.old_log_probs
    loss = 0.5 * inputs.settings.dro_beta * log_ratio.square() - inputs.advantages * inputs.log_probs
    return finish(inputs, loss, {"kl": -log_ratio})


def dppo_tv(inputs: PolicyLossInput) -> TokenLosses:
    """-min(rho, cap) * A * lp on the tokens inside the trust region of total variation. arXiv 2602.04879.

    Outside: the probability moved by more than the divergence in the direction that A pushes.
    """
    moved = (inputs.log_probs.exp() - inputs.old_log_probs.exp()).detach()
    return _trust_region(inputs, moved, moved.abs())


def dppo_kl(inputs: PolicyLossInput) -> TokenLosses:
    """As dppo_tv with the KL divergence of the two-way choice "this token or another". arXiv 2602.04879.

    q * log(q / p) + (1 - q) * log((1 - q) / (1 - p)), p the current, q the old probability.
    """
    log_p, log_q = inputs.log_probs.detach(), inputs.old_log_probs
    p, q = log_p.exp(), log_q.exp()
    rest = torch.log((1 - q + PROBABILITY_EPS) / (1 - p + PROBABILITY_EPS))
    return _trust_region(inputs, p - q, q * (log_q - log_p) + (1 - q) * rest)


def _trust_region(inputs: PolicyLossInput, moved: torch.Tensor, divergence: torch.Tensor) -> TokenLosses:
    s = inputs.settings
    positive = inputs.advantages > 0
    outside = torch.where(
        positive,
        (moved > 0) & ~(divergence <= s.divergence_high),
        (moved < 0) & ~(divergence <= s.divergence_low),
    )
    log_ratio = clamped_log_ratio(inputs.log_probs, inputs.old_log_probs).detach()
    ratio = log_ratio.exp()
    weight = torch.where(outside, 0.0, ratio.clamp_max(s.divergence_ratio_cap))
    metrics = {
        "clip_fraction": outside,
        "clip_fraction_lower": (ratio > s.divergence_ratio_cap) & ~outside,
        "kl": -log_ratio,
    }
    return finish(inputs, -weight * inputs.advantages * inputs.log_probs, metrics)
