"""What an environment is: it answers the model's turns until the trajectory is done.

    start(task)        -> the state, once before the first turn
    step(turn)         -> Observation: more text, and the model's next turn; or Done
    finish(episode)    -> Outcome: reward and counts, when the trajectory has ended, for whatever reason

One instance serves all trajectories of a rollouter at once. Whatever belongs to one trajectory is in its
state, a JSON object: that is what travels when a trajectory is parked and goes on in another process. A call
that was interrupted is made again there, so each of the three is made at least once, not exactly once; what
an interrupted call did to the state is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

State = dict[str, Any]
"""A JSON object. Keys that are no text come back as text."""


@dataclass(frozen=True)
class Task:
    """The row that a trajectory answers; the same at every call, wherever it is made."""

    sample_id: str
    prompt: str
    """Decoded, without special tokens."""
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]
    seed: int
    """For what an environment draws: another one for each trajectory, the same wherever it goes on."""


@dataclass(frozen=True)
class Passage:
    """What one side said at a time."""

    speaker: Literal["model", "environment"]
    text: str


@dataclass
class Turn:
    """The model has ended a turn. `state` is this call's own copy: change or replace it."""

    task: Task
    number: int
    """1 for the first turn."""
    text: str
    """What the model said in this turn, without special tokens."""
    history: tuple[Passage, ...]
    """What was said before it, oldest first."""
    state: State
    is_last: bool
    """`environment.max_turns` is reached: an Observation ends the trajectory as Done would, with the finish
    reason `turn_limit`."""


@dataclass(frozen=True)
class Observation:
    """What the model reads before its next turn: `messages` through its chat template, or `text` as it is.

    Special tokens within it are taken out, so that what a tool returns cannot pass for a turn.
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
    """What the reward is made of; with a reward only."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counts, such as `tool_calls`; their means are in the run log as `env/<name>/mean`. Not `turns`: they
    are counted anyhow."""


class Environment(Protocol):
    """Implement `step`; the others have a default for those who inherit from this class."""

    async def start(self, task: Task) -> State:
        """The state of a trajectory that begins."""
        return {}

    async def step(self, turn: Turn) -> Observation | Done:
        """Answer a turn that the model has ended by itself (one that the response limit cut has no answer).

        An exception fails the sample, which is then tried anew a few times; tell the model about an error of
        its own making, such as a malformed call, by an Observation.
        """
        ...

    async def finish(self, episode: Episode) -> Outcome:
        """Reward and counts of a trajectory that has ended."""
        return Outcome()
