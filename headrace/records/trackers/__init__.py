"""Trackers by name: where rows of `metrics.jsonl` and held-out scores go beside the run's own files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.plugins.trackers import CONSOLE

if TYPE_CHECKING:
    from headrace.config.run import RunConfig


class Tracker:
    """One tracker of a run, in the process that feeds them all. Any method may raise anything: the tracker is
    then left out, and the run goes on."""

    takes_back = False
    """Whether points of steps that a resume took back are purged; else a step keeps its first point."""

    def __init__(self, config: RunConfig, directory: Path, state: dict[str, Any], after: int) -> None:
        """`directory`: of its own in the run's. `state`: kept from start to start, as JSON. `after`: points
        of later steps come."""

    @staticmethod
    def problems(config: RunConfig) -> Iterator[str]:
        """What is wrong before the run starts, each with what to do."""
        return iter(())

    @staticmethod
    def warnings(config: RunConfig) -> Iterator[str]:
        """What can run but is most likely not meant."""
        return iter(())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite values of a step; those of one step may come in several calls."""
        raise NotImplementedError

    def flush(self) -> None:
        """Called before what was logged is taken for kept."""

    def close(self) -> None:
        """The run has ended, or stops for now."""


def wanted(config: RunConfig) -> list[str]:
    """Names of the run's trackers, each once."""
    return [name for name in dict.fromkeys(config.trainer.logger) if name != CONSOLE]
