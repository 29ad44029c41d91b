"""The three policies of decoupled PPO: behaviour (sampled), proximal (the ratio's centre), current.

arXiv 2110.00641, as in AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.algorithms.masked import masked_max, masked_mean, masked_sum, zero_outside

LINEAR_EPS = 1e-10


@dataclass(frozen=True)
class BehaviourFilter:
    """Bounds on how far the proximal policy may be from the behaviour policy.

    `mask` drops what lies outside [lower, upper], `clamp` cuts its weight to the bounds. `ratio` compares
    proximal / behaviour, the others a KL estimate. On sequence level the ratio is aggregated as logarithm
    (mean: the geometric mean, which then is the weight of every token), an estimate as it is.
    """

    upper: float
    lower: float | None = None
    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    agg: Literal["mean", "sum", "max"] = "mean"


@dataclass(frozen=True)
class BehaviourWeights:
    """`weights`: (B, T) without gradient, 0 where not kept. `kept`, `filtered`: (B, T) bool."""

    weights: torch.Tensor
    kept: torch.Tensor
    filtered: torch.Tensor


def behaviour_weights(
    proximal: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, bounds: BehaviourFilter
) -> BehaviourWeights:
    """Importance weights proximal / behaviour under `bounds`. All tensors (B, T) log-probs and mask."""
    on = mask > 0
    log_ratio = zero_outside(proximal.detach() - behaviour.detach(), on)
    ratio = log_ratio.exp()
    by_ratio = bounds.metric == "ratio"
    statistic = {
        "ratio": log_ratio if bounds.level == "sequence" else ratio,
        "kl_k1": log_ratio,
        "kl_k2": 0.5 * log_ratio.square(),
        "kl_k3": (-log_ratio).exp() - 1 + log_ratio,
    }[bounds.metric]
    if bounds.level == "sequence":
        if by_ratio:
            ratio = masked_mean(log_ratio, mask, dim=-1)[:, None].exp().expand_as(log_ratio)
        reduce = {"mean": masked_mean, "sum": masked_sum, "max": masked_max}[bounds.agg]
        statistic = reduce(statistic, mask, -1)[:, None].expand_as(log_ratio)
        if by_ratio:
            statistic = statistic.exp()
    low = 0.0 if bounds.lower is None else bounds.lower
    outside = statistic > bounds.upper
    if bounds.lower is not None:
        outside = outside | (statistic < bounds.lower)
    if bounds.action == "mask":
        return BehaviourWeights(zero_outside(ratio, on & ~outside), on & ~outside, on & outside)
    # A token's weight is clamped where the weight exceeds the bounds; a sequence's, where its statistic does.
    cut = ratio.clamp(low, bounds.upper)
    clamped = torch.where(outside, cut, ratio) if bounds.level == "sequence" else cut
    return BehaviourWeights(zero_outside(clamped, on), on, on & (clamped != ratio))


def interpolation_weight(versions: torch.Tensor, current_version: int) -> torch.Tensor:
    """alpha = (v - 1 - v_b) / (v - v_b), within [0, 1]; 0 for a token of version v or newer, or none (< 0).

    versions: the version of each token, stamped by the engine that sampled it. Count them in optimizer
    steps: a clock that ticks only at syncs would hide the local updates in between.
    """
    gap = current_version - versions
    return torch.where((gap > 0) & (versions >= 0), (gap - 1) / gap.clamp_min(1), 0.0).clamp(0, 1)


def approximate_proximal(
    behaviour: torch.Tensor,
    log_probs: torch.Tensor,
    versions: torch.Tensor,
    current_version: int,
    method: Literal["loglinear", "linear", "rollout"] = "loglinear",
) -> torch.Tensor:
    """Proximal log-probs without a forward pass, between behaviour and current. arXiv 2512.06547.

    loglinear: behaviour + alpha * (lp - behaviour); linear: log of the mixed probabilities; rollout:
    behaviour. All (B, T); without gradient.
    """
    now = log_probs.detach()
    alpha = interpolation_weight(versions, current_version).to(behaviour.dtype)
    if method == "loglinear":
        return behaviour + alpha * (now - behaviour)
    if method == "linear":
        return torch.log((1 - alpha) * behaviour.exp() + alpha * now.exp() + LINEAR_EPS)
    if method == "rollout":
        return behaviour.clone()
    raise ValueError(f"unknown proximal approximation {method!r}; known: loglinear, linear, rollout")
