"""Trackers: external destinations for the rows of `metrics.jsonl` and held-out scores, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.plugins.trackers import CONSOLE

if TYPE_CHECKING:
    from headrace.config.run import RunConfig


class Tracker:
    """One tracker of a run, in the process that feeds them all.

    Any method may raise anything: the tracker is then dropped, and the run continues.
    """

    takes_back = False
    """Whether points of steps that a resume took back are removed; otherwise a step keeps its first point."""

    def __init__(self, config: RunConfig, directory: Path, state: dict[str, Any], after: int) -> None:
        """`directory`: the tracker's own, in the run's. `state`: kept across starts, as JSON. `after`: only
        points of later steps will follow."""

    @staticmethod
    def problems(config: RunConfig) -> Iterator[str]:
        """Problems that prevent the run from starting, each with a remedy."""
        return iter(())

    @staticmethod
    def warnings(config: RunConfig) -> Iterator[str]:
        """Settings that work but are most likely not intended."""
        return iter(())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log finite values of a step. One step's values may come in several calls."""
        raise NotImplementedError

    def flush(self) -> None:
        """Make logged values durable: called before they are recorded as delivered."""

    def close(self) -> None:
        """Close the tracker: the run has ended or is stopping."""


def wanted(config: RunConfig) -> list[str]:
    """Names of the run's trackers, without duplicates."""
    return [name for name in dict.fromkeys(config.trainer.logger) if name != CONSOLE]
