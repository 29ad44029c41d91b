"""The contract of a policy loss: log-probs and advantages in, one loss per token out.

A loss does not divide: `aggregation.aggregate` turns the token losses into a scalar with denominators of the
whole mini-batch, so that the gradient does not depend on how it was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from headrace.algorithms.decoupled import BehaviourFilter
from headrace.algorithms.log_probs import safe_log_ratio
from headrace.algorithms.masked import zero_outside
from headrace.algorithms.registries import POLICY_LOSSES, PolicyLoss
from headrace.algorithms.rollout_correction import RolloutCorrectionConfig

__all__ = [
    "POLICY_LOSSES", "PolicyLoss", "PolicyLossInput", "PolicyLossSettings", "TokenLosses",
    "clamped_log_ratio", "finish", "policy_loss",
]  # fmt: skip


@dataclass(frozen=True)
class PolicyLossSettings:
    """Numbers of all losses; each reads its own."""

    clip_ratio_low: float = 0.2
    """The ratio counts down to 1 - this."""
    clip_ratio_high: float = 0.28
    """The ratio counts up to 1 + this."""
    clip_ratio_c: float | None = 3.0
    """Dual clip for negative advantages; None leaves it out."""
    tau_pos: float = 1.0
    """SAPO's temperature for positive advantages."""
    tau_neg: float = 1.05
    """SAPO's temperature for the others."""
    rho_max: float = 3.0
    """AIPO's cap on the importance weight."""
    divergence_low: float = 0.15
    """DPPO: largest divergence downwards (total variation or KL, per loss)."""
    divergence_high: float = 0.15
    """DPPO: largest divergence upwards."""
    divergence_ratio_cap: float = 20.0
    """DPPO's cap on the ratio."""
    dro_beta: float = 0.1
    """DRO's weight of the squared log-ratio."""
    kl_cov_ratio: float = 2e-4
    """KL-Cov: share of tokens that get the penalty."""
    ppo_kl_coef: float = 1.0
    """KL-Cov's weight of the penalty."""
    m2_threshold: float = 0.04
    """M2PO: the largest mean of the squared log-ratio."""
    adv_tau: float = 1.0
    """prime_rl: weight of the advantage."""
    kl_tau: float = 1e-3
    """prime_rl: weight of the squared log-ratio."""
    sequence_ratio: bool = False
    """decoupled_ppo: one ratio per sequence instead of per token."""
    behaviour_filter: BehaviourFilter | None = None
    """decoupled_ppo: how the weight of the proximal over the behaviour policy is bounded; None: no weight."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """bypass losses."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """For losses registered outside the project."""


@dataclass(frozen=True)
class PolicyLossInput:
    """One micro-batch; all tensors (B, T). Construction zeroes what lies outside the mask.

    Only `log_probs` carries a gradient.
    """

    log_probs: torch.Tensor
    """Of the policy that is trained, now."""
    old_log_probs: torch.Tensor
    """Of the policy that the ratio refers to (`actor.use_rollout_log_probs` says which)."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """1 on the tokens that are trained."""
    behaviour_log_probs: torch.Tensor | None = None
    """Of the policy that sampled, from the engine with the token. Without it, `old_log_probs` stand in."""
    importance_weights: torch.Tensor | None = None
    """Weights of a rollout correction; multiply the token losses."""
    settings: PolicyLossSettings = field(default_factory=PolicyLossSettings)

    def __post_init__(self) -> None:
        shape = self.log_probs.shape
        if len(shape) != 2:
            raise ValueError(f"log_probs must be (B, T), got {tuple(shape)}")
        if self.mask.shape != shape:
            raise ValueError(f"mask must be {tuple(shape)} as log_probs, got {tuple(self.mask.shape)}")
        on = self.mask > 0
        for name in ("old_log_probs", "advantages", "mask", "behaviour_log_probs", "importance_weights"):
            x = getattr(self, name)
            if x is None:
                continue
            if x.shape != shape:
                raise ValueError(f"{name} must be {tuple(shape)} as log_probs, got {tuple(x.shape)}")
            object.__setattr__(self, name, zero_outside(x, on).detach())
        object.__setattr__(self, "log_probs", zero_outside(self.log_probs, on))

    @property
    def on(self) -> torch.Tensor:
        return self.mask > 0

    @property
    def behaviour(self) -> torch.Tensor:
        """The behaviour log-probs, or the old ones where the batch has none."""
        return self.old_log_probs if self.behaviour_log_probs is None else self.behaviour_log_probs


@dataclass(frozen=True)
class TokenLosses:
    """`per_token`: (B, T), 0 where `mask` is 0, not aggregated.

    `mask`: (B, T) bool, the tokens kept; smaller than the input's where a loss rejects. Whoever divides
    chooses: by the tokens kept, or by the original ones, where rejecting shall not make the others heavier.
    `metrics`: (B, T) values without gradient, to be averaged over `mask`. `scalars`: of this batch.
    """

    per_token: torch.Tensor
    mask: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, torch.Tensor] = field(default_factory=dict)


def policy_loss(name: str, inputs: PolicyLossInput) -> TokenLosses:
    """Token losses of the policy loss `name`."""
    return POLICY_LOSSES.get(name)(inputs)


def clamped_log_ratio(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """log_probs - reference, within +-20."""
    return safe_log_ratio(log_probs - reference)


def finish(
    inputs: PolicyLossInput,
    per_token: torch.Tensor,
    metrics: dict[str, torch.Tensor] | None = None,
    kept: torch.Tensor | None = None,
    scalars: dict[str, torch.Tensor] | None = None,
) -> TokenLosses:
    """`per_token` times the importance weights, on the tokens `kept` (default: the mask)."""
    on = inputs.on if kept is None else inputs.on & kept
    if inputs.importance_weights is not None:
        per_token = per_token * inputs.importance_weights
    detached = {
        name: zero_outside(value.detach().to(per_token.dtype), on) for name, value in (metrics or {}).items()
    }
    return TokenLosses(zero_outside(per_token, on), on, detached, scalars or {})
