"""What one local update trained, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.batch import Batch
from headrace_trainer.records.run_log import part_means, part_sums


@dataclass(frozen=True)
class UpdateFacts:
    """Lists are in order of rank, with one value per trajectory; `spans` has one per sample."""

    rewards: list[float]
    lengths: list[int]
    """Tokens of the response."""
    turns: list[int]
    counted: list[Mapping[str, float]]
    """What the environment counted."""
    spans: list[int]
    """Newest minus oldest version."""
    part_means: dict[str, float]
    """By run log key: means of the rewards' parts."""
    reward_s: float
    """Seconds of scoring, summed over the samples."""
    tokens: int
    """Of prompts and responses, each prompt once for each trajectory."""
    cut: int
    """Responses cut by the length limit."""
    zero_spread: int
    """Groups whose rewards are all equal."""
    stale_trajectories: int
    """Trajectories with a token older than the window's version."""

    @classmethod
    def gather(cls, ranks: Ranks, batch: Batch, window: int) -> UpdateFacts:
        """Gather the facts of every rank's part of the batch. Collective."""
        samples = [s for mini in batch.mini for s in mini]
        mine = [t for s in samples for t in s.trajectories]
        facts: list[dict[str, Any]] = ranks.gather_all(
            {
                "rewards": [t.reward for t in mine],
                "lengths": [len(t.token_ids) for t in mine],
                "turns": [t.turns for t in mine],
                "counted": [t.environment_metrics for t in mine],
                "spans": [s.span for s in samples],
                "parts": part_sums([t.reward_parts for t in mine]),
                "reward_s": sum(s.reward_s for s in samples),
                "tokens": sum(
                    len(s.prompt.token_ids) + len(t.token_ids) for s in samples for t in s.trajectories
                ),
                "cut": sum(t.finish_reason == 2 for t in mine),
                "zero_spread": sum(len({t.reward for t in s.trajectories}) == 1 for s in samples),
                "stale": sum(t.versions is not None and t.versions[0] < window for t in mine),
            }
        )

        def joined(key: str) -> list[Any]:
            return [value for f in facts for value in f[key]]

        return cls(
            rewards=joined("rewards"),
            lengths=joined("lengths"),
            turns=joined("turns"),
            counted=joined("counted"),
            spans=joined("spans"),
            part_means=part_means([f["parts"] for f in facts]),
            reward_s=sum(f["reward_s"] for f in facts),
            tokens=sum(f["tokens"] for f in facts),
            cut=sum(f["cut"] for f in facts),
            zero_spread=sum(f["zero_spread"] for f in facts),
            stale_trajectories=sum(f["stale"] for f in facts),
        )


@dataclass
class PartialCounts:
    """Partial samples of a window."""

    partial: int = 0
    samples: int = 0
    """All that were trained."""
    largest_span: int = 0
    """Versions."""

    def add(self, spans: list[int]) -> None:
        """`spans`: of each sample of one update."""
        self.partial += sum(s > 0 for s in spans)
        self.samples += len(spans)
        self.largest_span = max([self.largest_span, *spans])

    @property
    def ratio(self) -> float:
        return self.partial / self.samples if self.samples else 0.0
