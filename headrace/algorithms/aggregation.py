"""Aggregates token losses into one scalar, with denominators of the whole mini-batch.

A denominator counts the mini-batch over all ranks and micro-batches. FSDP averages gradients over ranks, so a
rank's share is its local sum * data-parallel size / global denominator; summed over micro-batches and
averaged over ranks that is the global mean, however the mini-batch was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.algorithms.masked import COUNT_EPS, masked_count, masked_sum
from headrace.algorithms.registries import AGGREGATIONS


@dataclass(frozen=True)
class Denominators:
    """Global counts of one mini-batch."""

    tokens: float
    """Tokens that are trained."""
    sequences: float
    """Sequences with such a token."""
    horizon: float = 1.0
    """A constant of the run, for seq-mean-token-sum-norm: the longest response. Never the padded width,
    which changes from batch to batch."""
    data_parallel_size: int = 1


def count(mask: torch.Tensor, horizon: float = 1.0) -> Denominators:
    """Denominators of a batch that is not split. mask: (B, T)."""
    on = mask > 0
    return Denominators(float(on.sum()), float(on.any(-1).sum()), horizon)


def aggregate(
    name: str, per_token: torch.Tensor, mask: torch.Tensor, denominators: Denominators
) -> torch.Tensor:
    """This part's share of the scalar loss. per_token, mask: (B, T).

    A denominator of 0 means that nothing is trained: the loss is 0, with a gradient of 0.
    """
    return AGGREGATIONS.get(name)(per_token, mask, denominators)


def _share(total: torch.Tensor, denominator: float, size: int) -> torch.Tensor:
    return total * (size / denominator if denominator > 0 else 0.0)


def token_mean(per_token: torch.Tensor, mask: torch.Tensor, d: Denominators) -> torch.Tensor:
    """Sum / global tokens: every token weighs the same (DAPO, arXiv 2503.14476)."""
    return _share(masked_sum(per_token, mask), d.tokens, d.data_parallel_size)


def token_sum(per_token: torch.Tensor, mask: torch.Tensor, d: Denominators) -> torch.Tensor:
    """Sum over the tokens of all ranks."""
    return masked_sum(per_token, mask) * d.data_parallel_size


def seq_mean_token_sum(per_token: torch.Tensor, mask: torch.Tensor, d: Denominators) -> torch.Tensor:
    """Sum / global sequences."""
    return _share(masked_sum(per_token, mask), d.sequences, d.data_parallel_size)


def seq_mean_token_sum_norm(per_token: torch.Tensor, mask: torch.Tensor, d: Denominators) -> torch.Tensor:
    """Sum / global sequences / a constant horizon (Dr.GRPO, arXiv 2503.20783)."""
    if d.horizon <= 0:
        raise ValueError(f"seq-mean-token-sum-norm needs a positive horizon, got {d.horizon}")
    return seq_mean_token_sum(per_token, mask, d) / d.horizon


def seq_mean_token_mean(per_token: torch.Tensor, mask: torch.Tensor, d: Denominators) -> torch.Tensor:
    """Mean of each sequence, / global sequences (GRPO, arXiv 2402.03300). No sequence may be cut."""
    means = masked_sum(per_token, mask, -1) / (masked_count(per_token, mask, -1) + COUNT_EPS)
    return _share(means.sum(), d.sequences, d.data_parallel_size)
