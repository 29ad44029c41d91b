"""Trajectories with the data that the loss needs, and their tensors."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.models.packed_model import PackedRow, pack
from headrace.models.token_scores import Question
from headrace.wire.payloads import Prompt, Sample, Trajectory
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.plan import micro_batches

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass
class BatchRow:
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
) -> list[list[BatchRow]]:
    """The trajectories of each mini-batch. `step_of_version`: optimizer steps before each version, where the
    loss asks for them."""
    clock = sorted((int(version), step) for version, step in (step_of_version or {}).items())
    out = []
    for mini in mini_batches:
        rows = []
        for sample in mini:
            for t in sample.trajectories:
                row = BatchRow(sample.prompt, t, np.zeros(len(t.token_ids)), sample.baseline_reward)
                if step_of_version is not None:
                    row.behaviour_steps = _behaviour_steps(t, clock)
                rows.append(row)
        out.append(rows)
    return out


def mean_advantages(mini_batches: Sequence[Sequence[BatchRow]]) -> dict[str, list[float]]:
    """Sample id -> mean advantage over the trained tokens of each of its trajectories."""
    out: dict[str, list[float]] = {}
    for row in (row for mini in mini_batches for row in mini):
        mask = row.trajectory.loss_mask.astype(bool)
        mean = float(row.advantages[mask].mean()) if mask.any() else 0.0
        out.setdefault(row.prompt.sample_id, []).append(mean)
    return out


def _behaviour_steps(t: Trajectory, clock: list[tuple[int, int]]) -> FloatArray:
    """Optimizer step of each token's version. An unknown version counts as the newest older known one; one
    before the first step counts as the first."""
    out = np.zeros(len(t.token_ids))
    for s in t.segments:
        at = bisect.bisect_right(clock, s.version, key=lambda entry: entry[0])
        out[s.start : s.end] = max(0, clock[at - 1][1]) if at else 0
    return out


@dataclass
class MicroBatch:
    """Trajectories packed for the model, and their response tokens' data for the losses on a (B, R) grid,
    padded on the right."""

    packed: PackedRow
    question: Question
    """The N response tokens of all trajectories, in order."""
    counts: list[int]
    """Response tokens of each trajectory."""
    cells: torch.Tensor
    """(N,) where on the flattened grid each token is."""
    mask: torch.Tensor
    behaviour_log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    ref_log_probs: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    returns: torch.Tensor
    behaviour_steps: torch.Tensor

    def on_grid(self, per_token: torch.Tensor) -> torch.Tensor:
        """(N,) to (B, R), with 0 where there is no token."""
        grid = per_token.new_zeros(self.mask.numel())
        return grid.index_copy(0, self.cells, per_token).view(self.mask.shape)

    def by_row(self, per_token: torch.Tensor) -> list[FloatArray]:
        """(N,) on the device to an array per trajectory."""
        return [part.numpy() for part in per_token.cpu().split(self.counts)]


def pack_rows(
    rows: Sequence[BatchRow], device: torch.device, dtype: torch.dtype = torch.float32
) -> MicroBatch:
    """Pack prompt and response of each row end to end. No rows give two tokens that train nothing: with them
    a rank without rows takes part in the collectives of a forward pass."""
    shape = (max(1, len(rows)), max((len(row.trajectory.token_ids) for row in rows), default=1))
    sequences = [_token_ids(row) for row in rows] or [torch.zeros(2, dtype=torch.int64)]
    grids = [torch.zeros(shape, dtype=dtype) for _ in range(8)]
    positions, cells, temperatures = [], [], []
    begin = 0
    for number, row in enumerate(rows):
        t, count = row.trajectory, len(row.trajectory.token_ids)
        positions.append(torch.arange(begin + row.span.start, begin + row.span.stop))
        cells.append(torch.arange(count) + number * shape[1])
        temperatures.append(torch.full((count,), t.temperature, dtype=dtype))
        begin += row.tokens
        recomputed = row.old_log_probs if row.old_log_probs is not None else t.log_probs
        arrays = (
            t.loss_mask, t.log_probs, recomputed, row.ref_log_probs, row.advantages, row.values, row.returns,
            row.behaviour_steps,
        )  # fmt: skip
        for grid, array in zip(grids, arrays, strict=True):
            if array is not None:
                grid[number, :count] = torch.from_numpy(array.astype("float64")).to(dtype)
    packed = pack(sequences, device)
    where = torch.cat(positions or [torch.zeros(1, dtype=torch.int64)]).to(device)
    return MicroBatch(
        packed,
        Question(
            where,
            packed.input_ids[0][where + 1],
            torch.cat(temperatures or [torch.ones(1, dtype=dtype)]).to(device),
        ),
        [len(row.trajectory.token_ids) for row in rows] or [1],
        torch.cat(cells or [torch.zeros(1, dtype=torch.int64)]).to(device),
        *(grid.to(device) for grid in grids),
    )


def _token_ids(row: BatchRow) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([row.prompt.token_ids, row.trajectory.token_ids]).astype("int64"))


def in_micro_batches(rows: Sequence[BatchRow], limit: int, ranks: Ranks) -> Iterator[list[BatchRow]]:
    """This rank's micro-batches of at most `limit` tokens, padded with empty ones to the largest count of any
    rank. With unequal counts the collectives inside a pass would hang."""
    cuts = micro_batches([row.tokens for row in rows], limit)
    for index in range(ranks.largest(len(cuts))):
        heartbeat.beat()
        yield [rows[i] for i in cuts[index]] if index < len(cuts) else []
