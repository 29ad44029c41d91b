"""Generalised advantage estimation, whole and truncated."""

from __future__ import annotations

import torch

from headrace.algorithms.estimator import AdvantageInput, AdvantageOutput
from headrace.algorithms.masked import zero_outside
from headrace.algorithms.whitening import whiten


def lambda_sum(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor | None = None,
) -> torch.Tensor:
    """A_t = d_t + gamma * lam * A_{t+1} with d_t = r_t + gamma * V_{t+1} - V_t. arXiv 1506.02438.

    rewards, values, mask: (B, T); bootstrap: (B,) value after the last token, 0 when the trajectory ended.
    A masked token is skipped: the next value and the advantage behind it are carried across. Returns (B, T),
    0 outside the mask.
    """
    on = mask > 0
    next_value = torch.zeros_like(rewards[:, 0]) if bootstrap is None else bootstrap
    running = torch.zeros_like(rewards[:, 0])
    steps = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(on[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(on[:, t], values[:, t], next_value)
        steps.append(running)
    return zero_outside(torch.stack(steps[::-1], dim=1), on)


def last_value(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B,) value of each row's last trained token; 0 for a row without any."""
    on = mask > 0
    position = torch.arange(on.shape[1], device=on.device)
    last = (on * position).amax(-1, keepdim=True)
    return zero_outside(values.gather(1, last)[:, 0], on.any(-1))


def gae_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """GAE (arXiv 1506.02438), whitened unless `whiten` is false. returns = A + V before whitening."""
    values = batch.require("values", "gae")
    raw = lambda_sum(batch.token_level_rewards, values, batch.response_mask, batch.gamma, batch.lam)
    whitened = raw if batch.whiten is False else whiten(raw, batch.response_mask)
    return AdvantageOutput(whitened, zero_outside(raw + values, batch.on))


def tppo_advantages(batch: AdvantageInput) -> AdvantageOutput:
    """Truncated GAE: A_t = sum_k (gamma * lam)^k * d_{t+k}. arXiv 2506.15050, equation 6.

    A `truncated` trajectory has no next value yet: its last one stands in, V(s_l) := V(s_{l-1}). Treating it
    as finished would punish every token for not being done. With a `train_window` only its tokens get an
    advantage; the sum still runs over all. Whitened (over those tokens) only when `whiten` is true.
    """
    values = batch.require("values", "tppo")
    bootstrap = None
    if batch.truncated is not None:
        bootstrap = zero_outside(last_value(values, batch.response_mask), batch.truncated > 0)
    raw = lambda_sum(
        batch.token_level_rewards, values, batch.response_mask, batch.gamma, batch.lam, bootstrap
    )
    trained = batch.on if batch.train_window is None else batch.on & (batch.train_window > 0)
    advantages = whiten(raw, trained) if batch.whiten else zero_outside(raw, trained)
    return AdvantageOutput(advantages, zero_outside(raw + values, batch.on))
