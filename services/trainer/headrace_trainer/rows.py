"""Trajectories with what the loss needs of them, and their padded tensors."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.wire import Prompt, Sample, Trajectory
from headrace_trainer import heartbeat
from headrace_trainer.plan import micro_batches
from headrace_trainer.ranks import Ranks

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass
class Row:
    """One trajectory of a mini-batch. Arrays have one element per response token."""

    prompt: Prompt
    trajectory: Trajectory
    advantages: FloatArray
    baseline_reward: float | None = None
    """Of the greedy response to the same prompt."""
    old_log_probs: FloatArray | None = None
    """Recomputed under the weights at the start of the window; None: the engine's are the old ones."""
    sum_pi_squared: FloatArray | None = None
    """Sum over the vocabulary of squared probabilities, under the same weights."""
    ref_log_probs: FloatArray | None = None
    """Of the frozen reference model."""
    values: FloatArray | None = None
    """The critic's, before this update."""
    returns: FloatArray | None = None
    """What the critic learns."""
    behaviour_steps: FloatArray | None = None
    """Optimizer steps before the weights that sampled each token."""

    @property
    def tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt.token_ids) + len(self.trajectory.token_ids)

    @property
    def span(self) -> slice:
        """Positions whose logits predict the response: token i is predicted one position earlier."""
        start = len(self.prompt.token_ids) - 1
        return slice(start, start + len(self.trajectory.token_ids))


def make_rows(
    mini_batches: Sequence[Sequence[Sample]], step_of_version: dict[str, int] | None = None
) -> list[list[Row]]:
    """The trajectories of each mini-batch. `step_of_version`: optimizer steps before each version, where the
    loss asks for them."""
    clock = sorted((int(version), step) for version, step in (step_of_version or {}).items())
    out = []
    for mini in mini_batches:
        rows = []
        for sample in mini:
            for t in sample.trajectories:
                row = Row(sample.prompt, t, np.zeros(len(t.token_ids)), sample.baseline_reward)
                if step_of_version is not None:
                    row.behaviour_steps = _behaviour_steps(t, clock)
                rows.append(row)
        out.append(rows)
    return out


def mean_advantages(mini_batches: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    """Sample id -> mean advantage over the trained tokens of each of its trajectories."""
    out: dict[str, list[float]] = {}
    for row in (row for mini in mini_batches for row in mini):
        mask = row.trajectory.loss_mask.astype(bool)
        mean = float(row.advantages[mask].mean()) if mask.any() else 0.0
        out.setdefault(row.prompt.sample_id, []).append(mean)
    return out


def _behaviour_steps(t: Trajectory, clock: list[tuple[int, int]]) -> FloatArray:
    """A version that nobody knows counts as the newest older one that is known. What would lie before the
    first step counts as the first."""
    out = np.zeros(len(t.token_ids))
    for s in t.segments:
        at = bisect.bisect_right(clock, s.version, key=lambda entry: entry[0])
        out[s.start : s.end] = max(0, clock[at - 1][1]) if at else 0
    return out


@dataclass
class Rows:
    """Padded on the right. Token tensors are (B, T); `targets[:, t]` is predicted by the logits at t."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    behaviour_log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    ref_log_probs: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    returns: torch.Tensor
    behaviour_steps: torch.Tensor
    temperature: torch.Tensor
    """(B,)"""


def pad_rows(
    rows: Sequence[Row], pad_id: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Rows:
    """Prompt + response of each row. No rows give one row of padding that trains nothing: a rank that has
    none left takes part in the collectives of a forward pass with it."""
    shape = (max(1, len(rows)), max((row.tokens for row in rows), default=2))
    ids, attention, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    ids += pad_id
    mask, behaviour, old, ref, advantages, values, returns, steps = (
        torch.zeros(shape, dtype=dtype) for _ in range(8)
    )
    if not rows:
        attention += 1
    for number, row in enumerate(rows):
        t, span = row.trajectory, row.span
        response = slice(span.start + 1, span.stop + 1)
        ids[number, : response.start] = torch.from_numpy(row.prompt.token_ids.astype("int64"))
        ids[number, response] = torch.from_numpy(t.token_ids.astype("int64"))
        attention[number, : response.stop] = 1
        targets[number, span] = ids[number, response]
        recomputed = row.old_log_probs if row.old_log_probs is not None else t.log_probs
        for into, array in (
            (mask, t.loss_mask),
            (behaviour, t.log_probs),
            (old, recomputed),
            (ref, row.ref_log_probs),
            (advantages, row.advantages),
            (values, row.values),
            (returns, row.returns),
            (steps, row.behaviour_steps),
        ):
            if array is not None:
                into[number, span] = torch.from_numpy(array.astype("float64")).to(dtype)
    temperature = torch.ones(shape[0], dtype=dtype)
    temperature[: len(rows)] = torch.tensor([row.trajectory.temperature for row in rows], dtype=dtype)
    return Rows(
        *(
            x.to(device)
            for x in (
                ids, attention, targets, mask, behaviour, old, ref, advantages, values, returns, steps,
                temperature,
            )
        )
    )  # fmt: skip


def in_micro_batches(rows: Sequence[Row], limit: int, ranks: Ranks) -> Iterator[list[Row]]:
    """This rank's micro-batches of at most `limit` padded tokens, then empty ones until the rank with the
    most has had its last: equal numbers on all ranks, or the collectives inside a pass would hang."""
    cuts = micro_batches([row.tokens for row in rows], limit)
    for index in range(ranks.largest(len(cuts))):
        heartbeat.beat()
        yield [rows[i] for i in cuts[index]] if index < len(cuts) else []
