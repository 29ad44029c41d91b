"""Trajectories with what the loss needs of them, and their padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.wire import Float32Array, Prompt, Trajectory


@dataclass
class Row:
    """One trajectory of a mini-batch. Arrays have one element per response token."""

    prompt: Prompt
    trajectory: Trajectory
    advantages: Float32Array
    old_log_probs: Float32Array | None = None
    """Recomputed under the weights at the start of the window; None: the engine's are the old ones."""

    @property
    def tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt.token_ids) + len(self.trajectory.token_ids)

    @property
    def span(self) -> slice:
        """Positions whose logits predict the response: token i is predicted one position earlier."""
        start = len(self.prompt.token_ids) - 1
        return slice(start, start + len(self.trajectory.token_ids))


@dataclass
class Rows:
    """Padded on the right. Token tensors are (B, T); `targets[:, t]` is predicted by the logits at t."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    targets: torch.Tensor
    behaviour_log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    temperature: torch.Tensor
    """(B,)"""


def pad_rows(rows: Sequence[Row], pad_id: int, device: torch.device) -> Rows:
    """Prompt + response of each row."""
    shape = (len(rows), max(row.tokens for row in rows))
    ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention, targets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    behaviour, old, mask, advantages = (torch.zeros(shape, dtype=torch.float32) for _ in range(4))
    for number, row in enumerate(rows):
        t, span = row.trajectory, row.span
        response = slice(span.start + 1, span.stop + 1)
        ids[number, : response.start] = torch.from_numpy(row.prompt.token_ids.astype("int64"))
        ids[number, response] = torch.from_numpy(t.token_ids.astype("int64"))
        attention[number, : response.stop] = 1
        targets[number, span] = ids[number, response]
        behaviour[number, span] = torch.from_numpy(t.log_probs.astype("float32"))
        recomputed = row.old_log_probs if row.old_log_probs is not None else t.log_probs
        old[number, span] = torch.from_numpy(recomputed.astype("float32"))
        mask[number, span] = torch.from_numpy(t.loss_mask.astype("float32"))
        advantages[number, span] = torch.as_tensor(row.advantages, dtype=torch.float32)
    temperature = torch.tensor([row.trajectory.temperature for row in rows], dtype=torch.float32)
    return Rows(
        *(x.to(device) for x in (ids, attention, targets, behaviour, old, mask, advantages, temperature))
    )
