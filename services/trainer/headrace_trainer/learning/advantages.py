"""Turns the rewards of the whole R*M batch into one advantage per token, identically on every rank.

Advantages and whitening are statistics of the batch, not of the part that a rank happens to hold. The ranks
exchange rewards, lengths and masks. Each computes the same advantages in float64 and keeps those of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.algorithms.estimator import AdvantageInput, estimate
from headrace.algorithms.kl import kl_penalty
from headrace.algorithms.shaping import overlong_penalty, penalised_rewards
from headrace.config.run import RunConfig
from headrace.wire.payloads import FinishReason, Sample
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.rows import BatchRow, FloatArray, make_rows


@dataclass(frozen=True)
class BatchKl:
    """KL divergence to the reference over the whole batch: mean per token, and number of trajectories."""

    mean: float
    trajectories: int


def with_advantages(
    config: RunConfig, mini_batches: Sequence[Sequence[Sample]], ranks: Ranks | None = None
) -> list[list[BatchRow]]:
    """Rows of this rank, per mini-batch, for estimators that need rewards only. Collective with `ranks`."""
    rows = make_rows(mini_batches)
    fill_advantages(config, rows, ranks)
    return rows


def fill_advantages(
    config: RunConfig,
    mini_batches: Sequence[Sequence[BatchRow]],
    ranks: Ranks | None = None,
    kl_coef: float = 0.0,
) -> BatchKl | None:
    """Give every row its advantages and returns. Collective when `ranks` are given.

    Rows of one sample are adjacent. Values, reference and old log-probs are present if the configuration
    needs them. Returns the KL divergence if it is subtracted from the reward.
    """
    rows = [row for mini in mini_batches for row in mini]
    a = config.algorithm
    exchange = _Exchange(rows, a.gdpo_reward_keys, ranks)
    mask = exchange.masks()
    lengths, rewards = exchange.column("length").long(), exchange.column("reward")
    buffer = config.reward.overlong_buffer
    if buffer.enable:
        limit = config.data.max_response_length
        penalty = overlong_penalty(lengths, limit, buffer.len, buffer.penalty_factor)
        rewards = rewards + penalty.double()
    # The outcome reward goes on the last token that the policy chose: discounted sums over those tokens would
    # miss it elsewhere. If the policy chose none, it goes on the last token of all.
    last = torch.where((mask > 0).any(-1), (mask * torch.arange(mask.shape[1])).amax(-1), lengths - 1)
    token_rewards = torch.zeros(mask.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(rewards)), last] = rewards
    kl = None
    if a.use_kl_in_reward:
        kl = exchange.tokens(lambda row: _divergence(row, a.kl_penalty))
        token_rewards = penalised_rewards(token_rewards, kl, mask, kl_coef)
    needs = config.estimator
    weights = tuple(a.gdpo_reward_weights) if a.gdpo_reward_weights is not None else None
    out = estimate(
        a.adv_estimator,
        AdvantageInput(
            token_level_rewards=token_rewards,
            response_mask=mask,
            group_ids=exchange.groups(),
            lengths=lengths,
            values=exchange.tokens(lambda row: row.values) if config.critic.enable else None,
            truncated=exchange.column("truncated") > 0,
            reward_baselines=exchange.column("baseline") if needs.greedy_baseline else None,
            reward_components=exchange.components(),
            component_weights=weights,
            old_log_probs=exchange.tokens(lambda row: row.old_log_probs) if needs.sum_pi_squared else None,
            sum_pi_squared=exchange.tokens(lambda row: row.sum_pi_squared) if needs.sum_pi_squared else None,
            norm_by_std=a.norm_adv_by_std,
            gamma=a.gamma,
            lam=a.lam,
        ),
    )
    for number, row in enumerate(rows, start=exchange.first):
        count = len(row.trajectory.token_ids)
        row.advantages = out.advantages[number, :count].numpy()
        if config.critic.enable:
            row.returns = out.returns[number, :count].numpy()
    if kl is None:
        return None
    on = mask > 0
    return BatchKl(float(kl[on].mean()) if bool(on.any()) else 0.0, len(rewards))


def _divergence(row: BatchRow, name: str) -> FloatArray:
    """Per-token KL divergence of the old policy to the reference."""
    old = row.old_log_probs if row.old_log_probs is not None else row.trajectory.log_probs
    assert row.ref_log_probs is not None
    pair = [torch.from_numpy(np.asarray(x, dtype=np.float64)) for x in (old, row.ref_log_probs)]
    return kl_penalty(name, *pair).numpy()


_COLUMNS: dict[str, Callable[[BatchRow], float]] = {
    "length": lambda row: len(row.trajectory.token_ids),
    "reward": lambda row: row.trajectory.reward,
    "truncated": lambda row: row.trajectory.finish_reason is FinishReason.LENGTH,
    "baseline": lambda row: row.baseline_reward or 0.0,
}


def _component(row: BatchRow, key: str) -> float:
    """A part of the reward; `score` is the reward itself."""
    return row.trajectory.reward if key == "score" else row.trajectory.reward_parts[key]


class _Exchange:
    """Gathers facts about rows from all ranks, in order of rank."""

    def __init__(self, rows: Sequence[BatchRow], components: Sequence[str], ranks: Ranks | None) -> None:
        self._rows = rows
        self._ranks = ranks
        self._width = max((len(row.trajectory.token_ids) for row in rows), default=1)
        own = [
            [
                float(group),
                *(float(f(row)) for f in _COLUMNS.values()),
                *(_component(row, k) for k in components),
            ]
            for group, row in zip(_group_numbers(rows), rows, strict=True)
        ]
        width = 1 + len(_COLUMNS) + len(components)
        self._parts = self._gather(torch.tensor(own, dtype=torch.float64).reshape(-1, width))
        self._table = torch.cat(self._parts)
        self.first = sum(len(part) for part in self._parts[: ranks.rank if ranks is not None else 0])
        """Number of this rank's first row."""

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return self._ranks.gather_rows(mine) if self._ranks is not None else [mine]

    def column(self, name: str) -> torch.Tensor:
        """(B,) float64."""
        return self._table[:, 1 + list(_COLUMNS).index(name)]

    def components(self) -> torch.Tensor | None:
        """(K, B) float64."""
        found = self._table[:, 1 + len(_COLUMNS) :]
        return found.T if found.shape[1] else None

    def groups(self) -> torch.Tensor:
        """(B,) int64: rows of one sample have the same number, those of two samples never."""
        out, offset = [], 0
        for part in self._parts:
            out.append(part[:, 0].long() + offset)
            offset += int(part[:, 0].max()) + 1 if len(part) else 0
        return torch.cat(out)

    def tokens(self, fact: Callable[[BatchRow], FloatArray | None]) -> torch.Tensor:
        """(B, T) float64, 0 past the end of a row. Collective."""
        mine = torch.zeros((len(self._rows), self._width), dtype=torch.float64)
        for number, row in enumerate(self._rows):
            array = fact(row)
            if array is not None:
                mine[number, : len(array)] = torch.from_numpy(array.astype("float64"))
        return torch.cat(self._gather(mine))

    def masks(self) -> torch.Tensor:
        """(B, T) uint8. Collective."""
        mine = torch.zeros((len(self._rows), self._width), dtype=torch.uint8)
        for number, row in enumerate(self._rows):
            mine[number, : len(row.trajectory.token_ids)] = torch.from_numpy(row.trajectory.loss_mask.copy())
        return torch.cat(self._gather(mine))


def _group_numbers(rows: Sequence[BatchRow]) -> list[int]:
    """Group number of each row of this rank, counted from 0. Rows of one sample are adjacent."""
    out: list[int] = []
    for row, before in zip(rows, [None, *rows], strict=False):
        same = before is not None and before.prompt.sample_id == row.prompt.sample_id
        out.append(out[-1] + (not same) if out else 0)
    return out
