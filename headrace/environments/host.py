"""Runs an environment's coroutines beside the engine, each call with a deadline.

What this module guarantees:

- The environment has an event loop and a thread of its own: one that blocks holds up neither the engine nor
  the coordinator's commands. Were it never to return, the calls under way fail at their deadlines, and the
  next ones go to a fresh instance on a fresh thread.
- The state that a call sees is its own copy; only a call that returns in time changes what is kept.
- Whatever an environment does wrong is EnvironmentFailed, with its own exception as the cause.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from headrace.environments.loading import EnvironmentFailed
from headrace.environments.protocol import Done, Environment, Episode, Observation, Outcome, State, Task, Turn

log = logging.getLogger("headrace.environments")

T = TypeVar("T")

MAX_STATE_BYTES = 256 * 1024
"""A state travels with parked work, one for each trajectory."""
_ANSWERS_S = 1.0
"""A loop that has not answered for so long, right after a deadline, is blocked."""


class EnvironmentHost:
    """`make` makes an instance; it is called again should the one in use block for ever."""

    def __init__(self, make: Callable[[], Environment], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._place = _Place(make())

    async def start(self, task: Task) -> State:
        return checked_state(await self._call("start", lambda e: e.start(task)))

    async def step(self, turn: Turn) -> tuple[Observation | Done, State]:
        """The answer, and the state after it; `turn.state` is changed by the environment."""
        answer = await self._call("step", lambda e: e.step(turn))
        if not isinstance(answer, Observation | Done):
            raise EnvironmentFailed(f"step returned {answer!r:.200}; return an Observation or Done()")
        return answer, checked_state(turn.state)

    async def finish(self, episode: Episode) -> Outcome:
        outcome = await self._call("finish", lambda e: e.finish(episode))
        if not isinstance(outcome, Outcome):
            raise EnvironmentFailed(f"finish returned {outcome!r:.200}; return an Outcome")
        reward = None if outcome.reward is None else _number(outcome.reward, "reward")
        return Outcome(
            reward, _numbers(outcome.reward_parts, "reward_parts"), _numbers(outcome.metrics, "metrics")
        )

    async def _call(self, what: str, call: Callable[[Environment], Coroutine[Any, Any, T]]) -> T:
        place = self._place
        future = asyncio.run_coroutine_threadsafe(_guarded(call, place.environment), place.loop)
        waiting = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=self._timeout_s)
        finally:
            if not waiting.done():
                waiting.cancel()  # also the coroutine on the other loop
        if not done:
            await self._leave_if_blocked(place)
            raise EnvironmentFailed(
                f"{what} took longer than environment.step_timeout_s ({self._timeout_s:g} s)"
            )
        if waiting.cancelled():
            raise EnvironmentFailed(f"{what} cancelled itself")
        if (error := waiting.exception()) is not None:
            raise EnvironmentFailed(f"{what} raised {error!r}") from error
        return waiting.result()

    async def _leave_if_blocked(self, place: _Place) -> None:
        if await place.answers():
            return
        fresh = _Place(await asyncio.to_thread(self._make))
        if self._place is place:  # several calls may find out at once
            self._place = fresh
            log.error("the environment blocks its thread and was given up; a fresh one takes the next calls")


async def _guarded(call: Callable[[Environment], Coroutine[Any, Any, T]], environment: Environment) -> T:
    try:
        return await call(environment)
    except (SystemExit, KeyboardInterrupt) as error:  # would end the loop for everybody
        raise RuntimeError(f"it raised {error!r}") from error


class _Place:
    """An instance, its loop and its thread."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="environment", daemon=True).start()

    async def answers(self) -> bool:
        """Whether the loop still turns."""
        future = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop)
        done, _ = await asyncio.wait({asyncio.wrap_future(future)}, timeout=_ANSWERS_S)
        return bool(done)


def checked_state(state: Any) -> State:
    """A copy of `state`, as it would come back from another process. Raises EnvironmentFailed."""
    if not isinstance(state, dict):
        raise EnvironmentFailed(f"the state is {state!r:.200}; it must be a dictionary")
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"the state is no JSON object: {error}; keep plain data in it") from error
    if len(text) > MAX_STATE_BYTES:
        raise EnvironmentFailed(
            f"the state has {len(text)} bytes, {MAX_STATE_BYTES} are allowed: keep less in it"
        )
    copy: State = json.loads(text)
    return copy


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFailed(f"finish: {what} is {value!r:.200}, which is no number") from error
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise EnvironmentFailed(f"finish: {what} is {number}")
    return number


def _numbers(values: Mapping[str, float], what: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvironmentFailed(f"finish: {what} is {values!r:.200}; it must be a dictionary")
    return {str(k): _number(v, f"{what}[{k!r}]") for k, v in values.items()}
