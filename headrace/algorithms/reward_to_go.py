"""Advantage estimators based on the rewards still to come at each token."""

from __future__ import annotations

import torch

from headrace.algorithms.estimator import AdvantageInput, AdvantageOutput
from headrace.algorithms.groups import group_stats, group_sum
from headrace.algorithms.masked import zero_outside
from headrace.algorithms.whitening import whiten

BASELINE_EPS = 1e-8


def reward_to_go(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """R_t = r_t + gamma * R_{t+1} over trained tokens. rewards, mask: (B, T). Returns (B, T).

    A masked span is carried across: it neither discounts nor adds, so that a tool's answer does not cut the
    credit of the tokens before it. 0 outside the mask.
    """
    on = mask > 0
    running = torch.zeros_like(rewards[:, 0])
    steps = []
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(on[:, t], rewards[:, t] + gamma * running, running)
        steps.append(running)
    return zero_outside(torch.stack(steps[::-1], dim=1), on)


def reinforce_plus_plus_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """Whitened discounted reward-to-go. arXiv 2501.03262. `returns` are those before whitening."""
    returns = reward_to_go(batch.token_level_rewards, batch.response_mask, batch.gamma)
    return AdvantageOutput(whiten(returns, batch.response_mask), returns)


def remax_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """Reward-to-go minus the reward of the greedy response (`reward_baselines`). arXiv 2310.10505."""
    returns = reward_to_go(batch.token_level_rewards, batch.response_mask)
    baseline = batch.require("reward_baselines", "remax").to(returns.dtype)
    return AdvantageOutput(zero_outside(returns - baseline[:, None], batch.on), returns)


def optimal_token_baseline_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """R_t - B_t with one baseline per position of a group: B_t = sum(R_t * W_t) / sum(W_t).

    arXiv 2602.07078. W_t sums w_j = 1 - 2 * p_j + sum over the vocabulary of p^2, the squared norm of the
    score of token j, for j <= t; importance weights enter squared. Positions that only the group's longest
    trajectory reaches have no baseline, and neither has a group of one.
    """
    on = batch.on
    returns = reward_to_go(batch.token_level_rewards, batch.response_mask)
    p = batch.require("old_log_probs", "optimal_token_baseline").exp()
    energy = 1 - 2 * p + batch.require("sum_pi_squared", "optimal_token_baseline")
    if batch.importance_weights is not None:
        energy = energy * batch.importance_weights.square()
    cumulative = zero_outside(zero_outside(energy, on).cumsum(-1), on)
    stats = group_stats(batch.scores(), batch.group_ids)
    weighted = group_sum(returns * cumulative, stats.index)
    baseline = weighted / (group_sum(cumulative, stats.index) + BASELINE_EPS)
    # One past a row's last trained token, compared with the other rows of its group.
    position = torch.arange(1, on.shape[1] + 1, device=on.device)
    extent = (on * position).amax(-1)
    rivals = extent[:, None] >= position
    reached = group_sum(rivals.to(returns.dtype), stats.index)
    has_baseline = (reached > 1) & (stats.size > 1)[:, None]
    return AdvantageOutput(zero_outside(returns - zero_outside(baseline, has_baseline), on), returns)
