"""Configuration of the reward."""

from __future__ import annotations

from pydantic import Field

from headrace.config_base import Section


class RewardConfig(Section):
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, by path and name."""

    path: str
    """A Python file, or an importable module."""
    name: str = "compute_score"
    """The function's name."""
    timeout_s: float = Field(30.0, gt=0)
    """Longest call of the function."""
