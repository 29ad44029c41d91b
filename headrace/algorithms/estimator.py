"""The contract of an advantage estimator: one padded batch in, one advantage per token out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.algorithms.masked import zero_outside
from headrace.algorithms.registries import ADVANTAGE_ESTIMATORS, Estimator

__all__ = [
    "ADVANTAGE_ESTIMATORS", "AdvantageInput", "AdvantageOutput", "Estimator", "estimate", "per_trajectory"
]  # fmt: skip


@dataclass(frozen=True)
class AdvantageInput:
    """Whole groups of the whole batch (all mini-batches of a window): its statistics are the estimator's.

    Construction checks shapes and zeroes what does not count. Rewards count inside a trajectory, also on
    tool tokens, which the mask leaves out: inside means before `lengths`, or on the mask without `lengths`.
    """

    token_level_rewards: torch.Tensor
    """(B, T) float. Its dtype is that of the result."""
    response_mask: torch.Tensor
    """(B, T), 1 on the tokens that the policy sampled and that are trained."""
    group_ids: torch.Tensor
    """(B,) int64: rows with the same number answered the same prompt."""
    lengths: torch.Tensor | None = None
    """(B,) tokens of a trajectory, tool tokens included."""
    values: torch.Tensor | None = None
    """(B, T) critic, for gae and tppo."""
    truncated: torch.Tensor | None = None
    """(B,) bool for tppo: the trajectory was cut, so its last value bootstraps."""
    train_window: torch.Tensor | None = None
    """(B, T) for tppo: 1 on the tokens of the current window, the only ones to get an advantage."""
    reward_baselines: torch.Tensor | None = None
    """(B,) reward of the greedy response, for remax."""
    reward_components: torch.Tensor | None = None
    """(K, B) rewards that gdpo normalises one by one; without them, the one reward."""
    component_weights: tuple[float, ...] | None = None
    """Weight of each component, 1 each by default."""
    old_log_probs: torch.Tensor | None = None
    """(B, T), for optimal_token_baseline."""
    sum_pi_squared: torch.Tensor | None = None
    """(B, T) sum over the vocabulary of squared probabilities, for optimal_token_baseline."""
    importance_weights: torch.Tensor | None = None
    """(B, T) rollout correction, for optimal_token_baseline."""
    norm_by_std: bool = True
    """Divide by the group's deviation; false gives Dr.GRPO (grpo, grpo_passk, gdpo, pipelinerl)."""
    gamma: float = 1.0
    """Discount per trained token."""
    lam: float = 1.0
    """GAE's lambda."""
    whiten: bool | None = None
    """Whiten over the batch; None does what the method does (gae yes, tppo no)."""
    eps: float = 1e-6
    """Added to a group's deviation."""

    def __post_init__(self) -> None:
        rewards, mask = self.token_level_rewards, self.response_mask
        if rewards.ndim != 2 or mask.shape != rewards.shape:
            raise ValueError(
                f"rewards and mask must both be (B, T), got {tuple(rewards.shape)} and {tuple(mask.shape)}"
            )
        if not rewards.is_floating_point():
            raise ValueError(f"rewards must be floating point, got {rewards.dtype}")
        rows = rewards.shape[0]
        for name in ("group_ids", "lengths", "truncated", "reward_baselines"):
            x = getattr(self, name)
            if x is not None and x.shape != (rows,):
                raise ValueError(f"{name} must be ({rows},), got {tuple(x.shape)}")
        on = mask > 0
        if self.lengths is None:
            inside = on
        else:
            inside = torch.arange(rewards.shape[1], device=rewards.device) < self.lengths[:, None]
        self._set("token_level_rewards", zero_outside(rewards, inside))
        for name in ("values", "train_window", "old_log_probs", "sum_pi_squared", "importance_weights"):
            x = getattr(self, name)
            if x is None:
                continue
            if x.shape != rewards.shape:
                raise ValueError(
                    f"{name} must be {tuple(rewards.shape)} as the rewards, got {tuple(x.shape)}"
                )
            self._set(name, zero_outside(x, on))

    def _set(self, name: str, value: torch.Tensor) -> None:
        object.__setattr__(self, name, value)

    @property
    def on(self) -> torch.Tensor:
        """(B, T) bool mask."""
        return self.response_mask > 0

    def scores(self) -> torch.Tensor:
        """(B,) r: the sum of a trajectory's token rewards."""
        return self.token_level_rewards.sum(-1)

    def require(self, name: str, estimator: str) -> torch.Tensor:
        """The optional tensor `name`, or ValueError: `estimator` cannot do without."""
        x: torch.Tensor | None = getattr(self, name)
        if x is None:
            raise ValueError(f"advantage estimator {estimator!r} needs {name}; the batch has none")
        return x


@dataclass(frozen=True)
class AdvantageOutput:
    """`advantages` and `returns` (targets of a critic): (B, T), 0 outside the mask."""

    advantages: torch.Tensor
    returns: torch.Tensor


def per_trajectory(batch: AdvantageInput, advantage: torch.Tensor) -> AdvantageOutput:
    """The same advantage (B,) on every trained token of its row."""
    tokens = zero_outside(advantage[:, None].expand_as(batch.token_level_rewards), batch.on)
    return AdvantageOutput(tokens, tokens)


def estimate(name: str, batch: AdvantageInput) -> AdvantageOutput:
    """Advantages of `batch` by the estimator `name`, without gradient."""
    with torch.no_grad():
        return ADVANTAGE_ESTIMATORS.get(name)(batch)
