"""Configuration of the environment: what answers the model between its turns."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headrace.config.base import RUN, Section
from headrace.plugins.registry import Registry

SINGLE_TURN = "single_turn"
ENVIRONMENTS: Registry[Any] = Registry(
    "environment",
    {"calculator": "headrace.environments.calculator:Calculator"},
    group="headrace.environments",
)
"""Classes or functions that create an environment. `single_turn` has none and is not listed."""


class EnvironmentConfig(Section):
    """What answers the model between its turns; by default nothing does, and a response is one turn."""

    name: Annotated[str, RUN] = SINGLE_TURN
    """`single_turn`, `calculator`, one from an installed package, or, with `path`, the name of a class or
    function in it that creates an environment."""
    path: Annotated[str | None, RUN] = None
    """A Python file or importable module with your own environment."""
    kwargs: Annotated[dict[str, Any], RUN] = {}
    """Arguments that the environment is created with."""
    max_turns: int = Field(8, gt=0)
    """Most model turns in one trajectory; the response limit counts the tokens of all turns, the
    environment's included."""
    step_timeout_s: float = Field(30.0, gt=0)
    """Longest single call of the environment; beyond it the sample fails and is retried a few times."""

    @property
    def is_single_turn(self) -> bool:
        return self.path is None and self.name == SINGLE_TURN

    def problems(self, drain_stall_s: float) -> list[str]:
        """Return inconsistencies, each with its fix. `drain_stall_s`: the value of `sync.drain_stall_s`."""
        if self.path is None and self.name != SINGLE_TURN and not ENVIRONMENTS.knows(self.name):
            known = ", ".join([SINGLE_TURN, *ENVIRONMENTS.names()])
            return [
                f"environment.name: {self.name!r} is not installed ({known} are): set environment.path to "
                "the file or module that has it"
            ]
        if self.path is not None and self.name == SINGLE_TURN:
            return [
                f"environment.path: set environment.name too, to the class or function in {self.path} that "
                "makes the environment"
            ]
        if self.is_single_turn and self.kwargs:
            return ["environment.kwargs are for an environment: set environment.name, or leave them out"]
        if not self.is_single_turn and self.step_timeout_s >= drain_stall_s:
            return [
                f"environment.step_timeout_s = {self.step_timeout_s:g} is not below sync.drain_stall_s = "
                f"{drain_stall_s:g}: a rollouter that waits for an answer before a sync would be taken for "
                "stuck; lower the first or raise the second"
            ]
        return []
