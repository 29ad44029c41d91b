"""A small random batch, and the inputs of losses and estimators made of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headrace.algorithms.decoupled import BehaviourFilter
from headrace.algorithms.estimator import AdvantageInput
from headrace.algorithms.importance_weights import effective_sample_size
from headrace.algorithms.policy_loss import (
    PolicyLossInput,
    PolicyLossSettings,
    policy_loss,
)
from headrace.algorithms.rollout_correction import RolloutCorrectionConfig

torch.set_num_threads(1)

CORRECTION = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_batch_normalize=True,
    rollout_rs="token_k1,seq_mean_k3,seq_max_k2,sequence",
    rollout_rs_threshold="0.5_2.0,0.5,0.5,0.2_5.0",
    rollout_token_veto_threshold=1e-3,
)
SETTINGS = PolicyLossSettings(
    kl_cov_ratio=0.2,
    behaviour_filter=BehaviourFilter(upper=1.3, lower=0.8, level="sequence"),
    rollout_correction=CORRECTION,
)


class PpoSums(NamedTuple):
    """Of a batch, over its mask."""

    loss: torch.Tensor
    clipped: torch.Tensor
    clipped_lower: torch.Tensor
    kl: torch.Tensor


def ppo_sums(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
) -> PpoSums:
    """The policy loss `ppo` as the trainer calls it."""
    settings = PolicyLossSettings(clip_ratio_low=clip_low, clip_ratio_high=clip_high, clip_ratio_c=clip_c)
    losses = policy_loss("ppo", PolicyLossInput(log_probs, old, advantages, mask, settings=settings))
    m = losses.metrics
    return PpoSums(
        losses.per_token.sum(), m["clip_fraction"].sum(), m["clip_fraction_lower"].sum(), m["kl"].sum()
    )


def ess(log_weights: torch.Tensor) -> float:
    return float(effective_sample_size(log_weights, torch.ones_like(log_weights)))


def batch_of(dtype: torch.dtype = torch.float64, rows: int = 6, width: int = 7) -> dict[str, torch.Tensor]:
    """Random log-probs and rewards with gaps and padding in the mask."""
    g = torch.Generator().manual_seed(rows * 100 + width)
    mask = torch.ones(rows, width, dtype=dtype)
    for row in range(rows):
        mask[row, 2 + row % (width - 1) :] = 0
    mask[:, 1] = 0
    mask[0, 1] = 1

    def draw(scale: float) -> torch.Tensor:
        return (torch.randn(rows, width, generator=g, dtype=torch.float64) * scale).to(dtype)

    behaviour = -draw(1.0).abs()
    return {
        "mask": mask,
        "behaviour": behaviour,
        "old": behaviour + draw(0.2),
        "now": behaviour + draw(0.3),
        "advantages": draw(1.0),
        "values": draw(0.5),
        "rewards": draw(1.0) * mask,
        "weights": 1 + draw(0.2),
        "energy": draw(0.5).abs(),
        "ids": torch.arange(rows) // 2,
    }


def loss_input(b: dict[str, torch.Tensor], **changes: Any) -> PolicyLossInput:
    values: dict[str, Any] = {
        "log_probs": b["now"].clone().requires_grad_(),
        "old_log_probs": b["old"],
        "advantages": b["advantages"],
        "mask": b["mask"],
        "behaviour_log_probs": b["behaviour"],
        "importance_weights": b["weights"],
        "settings": SETTINGS,
    }
    return PolicyLossInput(**(values | changes))


def advantage_input(b: dict[str, torch.Tensor], **changes: Any) -> AdvantageInput:
    rows = len(b["mask"])
    values: dict[str, Any] = {
        "token_level_rewards": b["rewards"],
        "response_mask": b["mask"],
        "group_ids": b["ids"],
        "values": b["values"],
        "truncated": torch.arange(rows) % 2 == 0,
        "reward_baselines": torch.full((rows,), 0.25),
        "old_log_probs": b["old"],
        "sum_pi_squared": b["energy"],
        "importance_weights": b["weights"],
        "gamma": 0.9,
        "lam": 0.8,
    }
    return AdvantageInput(**(values | changes))
