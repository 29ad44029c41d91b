"""Advantage estimators that give a whole trajectory one advantage, from the rewards of its group.

In the formulas r is a trajectory's reward, m and s the mean and unbiased deviation of its group, G the
group's size. A group of equal rewards gets exactly 0 from every one of them: in floating point
mean([0.7] * 7) is not 0.7, and a division by a tiny deviation would blow the rest up.
"""

from __future__ import annotations

import torch

from headrace.algorithms.estimator import (
    AdvantageInput,
    AdvantageOutput,
    per_trajectory,
)
from headrace.algorithms.groups import centred, group_max, group_stats, group_sum
from headrace.algorithms.masked import zero_outside
from headrace.algorithms.whitening import whiten

PIPELINERL_EPS = 1e-4


def grpo(rewards: torch.Tensor, norm_by_std: bool = True, eps: float = 1e-6) -> torch.Tensor:
    """Group-relative advantage of one group.

    rewards: (G,) sum of each trajectory's token rewards. Returns (G,).
    (r - mean) / (std + eps) with the unbiased deviation (GRPO, arXiv 2402.03300); without the
    division it is Dr.GRPO's (arXiv 2503.20783). A group of one gets r. A group of equal rewards gets
    exactly zero.
    """
    return group_relative(rewards, torch.zeros_like(rewards, dtype=torch.int64), norm_by_std, eps)


def group_relative(
    scores: torch.Tensor, group_ids: torch.Tensor, norm_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """`grpo` of many groups at once. scores, group_ids: (B,). Returns (B,)."""
    stats = group_stats(scores, group_ids)
    relative = centred(scores, stats)
    if not norm_by_std:
        return relative
    return torch.where(stats.size > 1, relative / (stats.std + eps), relative)


def leave_one_out(scores: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """r - mean of the others = G / (G - 1) * (r - m); r for a group of one. (B,) each."""
    stats = group_stats(scores, group_ids)
    return centred(scores, stats) * torch.where(stats.size > 1, stats.size / (stats.size - 1), 1.0)


def _alone_zero(advantage: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    return zero_outside(advantage, group_stats(advantage, group_ids).size > 1)


def grpo_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """(r - m) / (s + eps), or r - m without `norm_by_std`; r for a group of one.

    arXiv 2402.03300, without the division 2503.20783.
    """
    return per_trajectory(
        batch, group_relative(batch.scores(), batch.group_ids, batch.norm_by_std, batch.eps)
    )


def grpo_passk_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """The best trajectory gets (best - second best) / (s + eps), the others 0; a tie at the top gives 0.

    arXiv 2503.19595. Raises ValueError for a group of one: there is no second best.
    """
    scores = batch.scores()
    stats = group_stats(scores, batch.group_ids)
    alone = torch.nonzero(stats.size < 2)
    if alone.numel():
        group = int(batch.group_ids[alone[0]])
        raise ValueError(f"grpo_passk needs two trajectories per group or more; group {group} has one")
    at_top = scores == stats.maximum
    best = at_top & (group_sum(at_top.to(scores.dtype), stats.index) == 1)
    second = group_max(torch.where(best, -torch.inf, scores), stats.index)
    lead = zero_outside(scores - second, best)
    return per_trajectory(batch, lead / (stats.std + batch.eps) if batch.norm_by_std else lead)


def rloo_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """G / (G - 1) * (r - m), the distance to the mean of the others; r for a group of one.

    arXiv 2402.14740.
    """
    return per_trajectory(batch, leave_one_out(batch.scores(), batch.group_ids))


def rloo_or_zero_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """As rloo (arXiv 2402.14740), but a group of one gets 0: there is nothing to compare it with."""
    return per_trajectory(batch, _alone_zero(leave_one_out(batch.scores(), batch.group_ids), batch.group_ids))


def pipelinerl_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """(r - mean of the others) / (s + 1e-4), 0 for a group of one (PipelineRL, arXiv 2509.19128)."""
    scores = batch.scores()
    advantage = _alone_zero(leave_one_out(scores, batch.group_ids), batch.group_ids)
    if batch.norm_by_std:
        advantage = advantage / (group_stats(scores, batch.group_ids).std + PIPELINERL_EPS)
    return per_trajectory(batch, advantage)


def opo_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """r - sum(l * r) / sum(l), l = number of trained tokens; r for a group of one. arXiv 2505.23585."""
    scores = batch.scores()
    stats = group_stats(scores, batch.group_ids)
    length = batch.on.sum(-1).to(scores.dtype)
    baseline = group_sum(length * scores, stats.index) / group_sum(length, stats.index).clamp_min(1)
    advantage = torch.where(stats.equal, 0.0, scores - baseline)
    return per_trajectory(batch, torch.where(stats.size > 1, advantage, scores))


def gpg_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """a * (r - m), a = rows of the batch / rows with a non-zero reward; a * r for a group of one.

    arXiv 2504.02546.
    """
    scores = batch.scores()
    alpha = scores.numel() / torch.count_nonzero(scores).clamp_min(1).to(scores.dtype)
    return per_trajectory(batch, alpha * centred(scores, group_stats(scores, batch.group_ids)))


def reinforce_plus_plus_baseline_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """r - m (r for a group of one), then whitening over the tokens of the batch. arXiv 2501.03262."""
    scores = batch.scores()
    spread = per_trajectory(batch, centred(scores, group_stats(scores, batch.group_ids))).advantages
    advantages = whiten(spread, batch.response_mask)
    return AdvantageOutput(advantages, advantages)


def magistral_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """r - m, then normalised over the trajectories of the batch. arXiv 2506.10910.

    A group of one gets 0 before that. The paper filters groups without signal beforehand.
    """
    scores = batch.scores()
    relative = _alone_zero(centred(scores, group_stats(scores, batch.group_ids)), batch.group_ids)
    return per_trajectory(batch, normalised(relative))


def normalised(x: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """(x - mean) / deviation over all of x; exactly 0 where there is no spread."""
    if x.numel() < 2 or bool((x == x[0]).all()):
        return torch.zeros_like(x)
    return (x - x.mean()) / x.std(correction=1 if unbiased else 0)


def gdpo_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """Each reward component on its own as grpo, weighted sum, then whitening over the tokens.

    arXiv 2601.05242. Without `reward_components` the one reward is the only component.
    """
    components = batch.scores()[None] if batch.reward_components is None else batch.reward_components
    weights = batch.component_weights or (1.0,) * len(components)
    total = torch.zeros_like(batch.scores())
    for weight, scores in zip(weights, components.to(total.dtype), strict=True):
        total = total + weight * group_relative(scores, batch.group_ids, batch.norm_by_std, batch.eps)
    advantages = whiten(per_trajectory(batch, total).advantages, batch.response_mask)
    return AdvantageOutput(advantages, advantages)
