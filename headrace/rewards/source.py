"""The interface of all rewards: a response goes in, its score comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Response:
    """A response to judge, with what the reward needs to judge it."""

    data_source: str
    solution: str
    """The response's text, special tokens removed."""
    ground_truth: str
    extra_info: dict[str, Any]
    """The row's own, `finish_reason`, and `prompt` where a source needs it: text or chat messages."""


@dataclass(frozen=True)
class Judged:
    score: float
    parts: dict[str, float]
    """Kept as metrics."""
    answer: str | None
    """The answer that counts in a majority vote. None: the whole response."""


class Source(Protocol):
    """One kind of reward."""

    async def start(self) -> None:
        """Load or reach whatever is needed. Raises RewardError."""

    async def judge(self, response: Response) -> Judged:
        """Ends within the source's deadline. Raises RewardError."""

    async def close(self) -> None:
        """Release processes and connections."""
