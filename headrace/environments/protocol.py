"""The environment interface: it answers the model's turns until the trajectory is done.

    start(task)        -> the state, once before the first turn
    step(turn)         -> Observation: more text, then the model's next turn; or Done
    finish(episode)    -> Outcome: reward and counts, when the trajectory has ended, for whatever reason

One instance serves all trajectories of a rollouter concurrently. Everything that belongs to one trajectory is
in its state, a JSON object, which travels with it when it is parked and resumed in another process. An
interrupted call is repeated there, so each of the three is called at least once, not exactly once. Changes
that an interrupted call made to the state are discarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

State = dict[str, Any]
"""A JSON object. Keys that are not strings come back as strings."""


@dataclass(frozen=True)
class Task:
    """The row that a trajectory answers. It is the same in every call, in any process."""

    sample_id: str
    prompt: str
    """Decoded, without special tokens."""
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]
    seed: int
    """Seed for the environment's random draws. It differs per trajectory and survives parking."""


@dataclass(frozen=True)
class Passage:
    """What one side said without interruption."""

    speaker: Literal["model", "environment"]
    text: str


@dataclass
class Turn:
    """A turn that the model has ended. `state` is this call's own copy: change or replace it."""

    task: Task
    number: int
    """1 for the first turn."""
    text: str
    """What the model said in this turn, without special tokens."""
    history: tuple[Passage, ...]
    """What was said before this turn, oldest first."""
    state: State
    is_last: bool
    """Whether `environment.max_turns` is reached. An Observation then ends the trajectory as Done would, with
    the finish reason `turn_limit`."""


@dataclass(frozen=True)
class Observation:
    """What the model reads before its next turn: `messages` through its chat template, or `text` as it is.

    Special tokens in it are removed, so that a tool's output cannot pass for a turn.
    """

    text: str = ""
    messages: Sequence[Mapping[str, str]] = ()
    """Each with `role` and `content`, such as {"role": "tool", "content": "42"}."""


@dataclass(frozen=True)
class Done:
    """The model's last turn ends the trajectory."""


@dataclass(frozen=True)
class Episode:
    """A trajectory that has ended. `text` is the model's last turn, which a limit may have cut."""

    task: Task
    turns: int
    text: str
    history: tuple[Passage, ...]
    state: State
    finish_reason: str
    """`stop`, `length` or `turn_limit`."""


@dataclass(frozen=True)
class Outcome:
    reward: float | None = None
    """None: the run's reward function scores the whole response."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward, used only with a reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counts, such as `tool_calls`. The run log has their means as `env/<name>/mean`. `turns` is reserved,
    because Headrace counts turns itself."""


class Environment(Protocol):
    """Interface of an environment. Implement `step`; subclasses inherit defaults for the others."""

    async def start(self, task: Task) -> State:
        """The initial state of a trajectory."""
        return {}

    async def step(self, turn: Turn) -> Observation | Done:
        """Answer a turn that the model ended itself. A turn cut by the response limit gets no answer.

        An exception fails the sample, which is then retried a few times. Report the model's own errors, such
        as a malformed call, to it in an Observation.
        """
        ...

    async def finish(self, episode: Episode) -> Outcome:
        """Reward and counts of a finished trajectory."""
        return Outcome()
