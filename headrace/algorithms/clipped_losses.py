"""Policy losses that bound PPO's ratio: clipping, soft gates, dropping tokens."""

from __future__ import annotations

import torch

from headrace.algorithms.m2po import second_moment_mask
from headrace.algorithms.policy_loss import (
    PolicyLossInput,
    TokenLosses,
    clamped_log_ratio,
    finish,
)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, c: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """max(-A * rho, -A * clip(rho, 1 - low, 1 + high)), and for A < 0 no more than -c * A.

    PPO arXiv 1707.06347, the dual clip 1912.09729. All (B, T). Returns (loss, clipped, clipped_lower),
    the last two bool.
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if c is None:
        return loss, clipped, torch.zeros_like(clipped)
    if c <= 1:
        raise ValueError(f"clip_ratio_c must exceed 1, got {c}")
    floor = -advantages * c
    negative = advantages < 0
    return torch.where(negative, torch.minimum(loss, floor), loss), clipped, negative & (loss > floor)


def _clipped(inputs: PolicyLossInput, kept: torch.Tensor | None = None) -> TokenLosses:
    s = inputs.settings
    log_ratio = clamped_log_ratio(inputs.log_probs, inputs.old_log_probs)
    loss, clipped, lower = clipped_surrogate(
        log_ratio.exp(), inputs.advantages, s.clip_ratio_low, s.clip_ratio_high, s.clip_ratio_c
    )
    metrics = {"clip_fraction": clipped, "clip_fraction_lower": lower, "kl": -log_ratio}
    return finish(inputs, loss, metrics, kept)


def ppo(inputs: PolicyLossInput) -> TokenLosses:
    """PPO with clip-higher (DAPO, arXiv 2503.14476) and the dual clip; the weight multiplies afterwards."""
    return _clipped(inputs)


def m2po(inputs: PolicyLossInput) -> TokenLosses:
    """Drop the tokens of the largest squared log-ratio until its mean is small enough, then ppo.

    arXiv 2510.01161. The log-ratio is that of the behaviour over the old policy; where they are one, of the
    current over the old. Selected over the tokens passed: the selection depends on the micro-batch.
    """
    reference = inputs.old_log_probs if inputs.behaviour_log_probs is not None else inputs.log_probs.detach()
    return _clipped(
        inputs,
        second_moment_mask(inputs.behaviour, reference, inputs.mask, inputs.settings.m2_threshold),
    )


def sapo(inputs: PolicyLossInput) -> TokenLosses:
    """-(4 / tau) * sigmoid(tau * (rho - 1)) * A, tau by the sign of A. arXiv 2511.20347."""
    log_ratio = clamped_log_ratio(inputs.log_probs, inputs.old_log_probs)
    tau = torch.where(inputs.advantages > 0, inputs.settings.tau_pos, inputs.settings.tau_neg)
    tau = tau.to(log_ratio.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    return finish(inputs, -gate * inputs.advantages, {"kl": -log_ratio})


def prime_rl(inputs: PolicyLossInput) -> TokenLosses:
    """-keep * adv_tau * A * rho + kl_tau * (log rho)^2, rho over the behaviour policy.

    The default loss of prime-rl, after DPPO (arXiv 2602.04879): a token is not kept when its probability
    moved by more than the divergence in the direction that its advantage pushes. The square stays on all.
    """
    s = inputs.settings
    log_ratio = clamped_log_ratio(inputs.log_probs, inputs.behaviour)
    moved = (inputs.log_probs.exp() - inputs.behaviour.exp()).detach()
    positive = inputs.advantages > 0
    dropped = torch.where(positive, moved > s.divergence_high, moved < -s.divergence_low)
    gain = torch.where(dropped, 0.0, s.adv_tau * inputs.advantages * log_ratio.exp())
    metrics = {
        "clip_fraction": dropped,
        "dropped_high": dropped & positive,
        "dropped_low": dropped & (inputs.advantages < 0),
        "mismatch_kl": log_ratio.exp() - log_ratio - 1,
    }
    return finish(inputs, s.kl_tau * log_ratio.square() - gain, metrics)


def kl_cov(inputs: PolicyLossInput) -> TokenLosses:
    """-A * rho, plus ppo_kl_coef * |log rho| on the share of tokens with the largest covariance.

    arXiv 2505.22617. The covariance of a token is (A - mean A) * (lp - mean lp) over the tokens passed, of
    which max(1, floor(kl_cov_ratio * n)) get the penalty: the selection depends on the micro-batch.
    """
    log_ratio = clamped_log_ratio(inputs.log_probs, inputs.old_log_probs)
    loss = -inputs.advantages * log_ratio.exp()
    on = inputs.on
    count = int(on.sum())
    selected = torch.zeros_like(on)
    if count:
        log_probs = inputs.log_probs.detach()[on]
        advantages = inputs.advantages[on]
        covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
        chosen = covariance.topk(max(1, int(count * inputs.settings.kl_cov_ratio))).indices
        flags = torch.zeros_like(covariance, dtype=torch.bool)
        flags[chosen] = True
        selected = selected.masked_scatter(on, flags)
    loss = torch.where(selected, loss + inputs.settings.ppo_kl_coef * log_ratio.abs(), loss)
    return finish(inputs, loss, {"absolute_kl": log_ratio.abs(), "clip_fraction": selected})
