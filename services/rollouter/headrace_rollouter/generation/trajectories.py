"""Runs one trajectory to its end: the model's turns, and the environment's answers between them.

Without an environment a trajectory is one turn. With one:

    start -> [engine: a turn -> step -> observation] ... -> Done, or a limit

What this module guarantees:

- A trajectory can stop at any point and resume in another process from the object alone, which holds ids,
  log-probs, versions, turns and the environment's state. If it stopped within a turn, that turn continues. If
  it stopped while the environment was answering, the environment is asked again.
- Tokens that the policy did not choose have loss mask 0 and log-prob 0.0. Their version is the one served
  when they are added, so that segments cover all tokens and versions never decrease.
- Environment and model together never exceed `data.max_response_length`. An observation that does not fit,
  with room for one more model token, is not added: the trajectory ends after the turn, as `length`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from headrace.config.run import RunConfig
from headrace.environments import Done, Episode, Outcome, Passage, Task, Turn
from headrace.metrics import rollouter as metrics
from headrace.wire.payloads import FinishReason, Int32Array, Prompt, Trajectory, added_by_environment, extend
from headrace_rollouter.generation.environment_turns import EnvironmentTurns
from headrace_rollouter.inference.serving import Serving

T = TypeVar("T")

SeedOf = Callable[[int], int | None]
"""Maps the number of existing tokens to the seed of what is sampled next. None means greedy."""


class TokenSource(Protocol):
    """The part of the engine that trajectories need."""

    async def generate(self, prompt_ids: Int32Array, head: Trajectory, seed: int | None) -> Trajectory: ...


class _Interrupted(Exception):
    """The rollouter is draining."""


class Trajectories:
    """Drives the trajectories of one rollouter. `decode`: ids to text, without the stop token of a turn."""

    def __init__(
        self,
        config: RunConfig,
        engine: TokenSource,
        decode: Callable[[list[int]], str],
        serving: Serving,
        environment: EnvironmentTurns | None,
    ) -> None:
        self._limit = config.data.max_response_length
        self._max_turns = config.environment.max_turns
        self._engine = engine
        self._decode = decode
        self._serving = serving
        self._environment = environment
        self.answers = 0
        """Turns that the environment has answered. They count as progress, as tokens do."""

    @property
    def has_environment(self) -> bool:
        return self._environment is not None

    async def to_the_end(self, prompt: Prompt, t: Trajectory, seed_of: SeedOf, task_seed: int) -> Trajectory:
        """Continue `t` to its end. The result is UNFINISHED when a drain interrupted it.

        `task_seed`: the environment's seed, the same wherever the trajectory resumes. Greedy ones have it.
        Raises EnvironmentFailed, and whatever the engine raises.
        """
        if t.finish_reason is not FinishReason.UNFINISHED or self._serving.draining:
            return t
        environment = self._environment
        if environment is None:
            return await self._engine.generate(prompt.token_ids, t, seed_of(len(t.token_ids)))
        task = self._task(prompt, task_seed)
        with contextlib.suppress(_Interrupted):
            if t.environment_state is None:
                t = replace(t, environment_state=await self._unless_draining(environment.host.start(task)))
            while t.finish_reason is FinishReason.UNFINISHED and not self._serving.draining:
                if t.awaits_environment:
                    t = await self._unless_draining(self._answered(environment, task, t))
                else:
                    t = _with_turn_ended(
                        await self._engine.generate(prompt.token_ids, t, seed_of(len(t.token_ids)))
                    )
                    if t.finish_reason is FinishReason.UNFINISHED and not t.awaits_environment:
                        break  # the engine aborted the request
        return t

    async def outcome(self, prompt: Prompt, t: Trajectory, task_seed: int) -> Outcome | None:
        """The environment's verdict on a finished trajectory, or None without an environment.

        Raises EnvironmentFailed.
        """
        if self._environment is None:
            return None
        history, text = self._passages(t)
        episode = Episode(
            task=self._task(prompt, task_seed),
            turns=t.turns,
            text=text,
            history=history,
            state=copy.deepcopy(t.environment_state or {}),
            finish_reason=t.finish_reason.name.lower(),
        )
        with _measured("finish"):
            return await self._environment.host.finish(episode)

    def last_turn(self, t: Trajectory) -> str:
        """The model's latest turn."""
        return self._passages(t)[1]

    def _task(self, prompt: Prompt, seed: int) -> Task:
        return Task(
            sample_id=prompt.sample_id,
            prompt=self._decode(prompt.token_ids.tolist()),
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=copy.deepcopy(prompt.extra_info),
            seed=seed,
        )

    async def _answered(self, environment: EnvironmentTurns, task: Task, t: Trajectory) -> Trajectory:
        """Add the environment's answer to the last turn of `t`, or end `t`."""
        history, text = self._passages(t)
        is_last = len(t.turn_ends) >= self._max_turns
        state = copy.deepcopy(t.environment_state or {})
        turn = Turn(task, len(t.turn_ends), text, history, state, is_last)
        with _measured("step"):
            answer, state = await environment.host.step(turn)
        self.answers += 1
        t = replace(t, environment_state=state)
        if isinstance(answer, Done):
            return replace(t, finish_reason=FinishReason.STOP)
        if is_last:
            return replace(t, finish_reason=FinishReason.TURN_LIMIT)
        ids = environment.encode(answer)
        if len(t.token_ids) + len(ids) >= self._limit:
            return replace(t, finish_reason=FinishReason.LENGTH)
        # The engine may have stamped tokens with a new version before `serving` was updated.
        version = max(self._serving.version, t.segments[-1].version)
        return extend(t, added_by_environment(ids, version, t.temperature))

    async def _unless_draining(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`. Once a drain begins, cancel it and raise _Interrupted."""
        task = asyncio.ensure_future(call)
        stop = asyncio.ensure_future(self._serving.drain_began.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Interrupted
            return task.result()
        finally:
            for each in (task, stop):
                each.cancel()

    def _passages(self, t: Trajectory) -> tuple[tuple[Passage, ...], str]:
        """Split into (passages before the model's last turn, text of that turn)."""
        ids, mask = t.token_ids, t.loss_mask
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)] if len(ids) else [0]
        found = [
            Passage("model" if mask[start] else "environment", self._decode(ids[start:end].tolist()))
            for start, end in itertools.pairwise(edges)
        ]
        if not found or found[-1].speaker == "environment":
            return tuple(found), ""
        return tuple(found[:-1]), found[-1].text


def _with_turn_ended(t: Trajectory) -> Trajectory:
    """Mark the end of the engine's turn. If the model ended it itself, the environment's answer is next."""
    if t.finish_reason is FinishReason.UNFINISHED:
        return t
    ended = replace(t, turn_ends=[*t.turn_ends, len(t.token_ids)])
    if t.finish_reason is FinishReason.STOP:
        return replace(ended, finish_reason=FinishReason.UNFINISHED)
    return ended


@contextlib.contextmanager
def _measured(call: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        metrics.ENVIRONMENT_SECONDS.labels(call=call).observe(time.monotonic() - began)
