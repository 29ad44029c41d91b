"""Sums over the tokens of one local update, and the counts that a mini-batch's loss is divided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from headrace.algorithms.aggregation import Denominators
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.rows import BatchRow


@dataclass
class TokenSums:
    """Float fields are sums over this rank's tokens. Other fields are not reduced over ranks."""

    tokens: float = 0.0

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.type == "float"]

    def vector(self) -> list[float]:
        """The sums in the order of `names`."""
        return [getattr(self, name) for name in self.names()]

    def add(self, other: Self) -> None:
        """Add the sums of `other`."""
        for name in self.names():
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def over(self, ranks: Ranks) -> Self:
        """The sums over all ranks. Collective."""
        return type(self)(**dict(zip(self.names(), ranks.sums(self.vector()), strict=True)))


def denominators(rows: Sequence[BatchRow], horizon: int, ranks: Ranks) -> Denominators:
    """Denominators of the whole mini-batch, of which `rows` are this rank's part. Collective."""
    counts = [int(row.trajectory.loss_mask.sum()) for row in rows]
    tokens, sequences = ranks.sums([float(sum(counts)), float(sum(n > 0 for n in counts))])
    return Denominators(tokens, sequences, float(horizon), ranks.world_size)
