"""Runs an environment's coroutines beside the engine, each call with a deadline.

What this module guarantees:

- The environment has an event loop and a thread of its own: one that blocks holds up neither the engine nor
  the coordinator's commands. Were it never to return, the calls under way fail at their deadlines, and the
  next ones go to a fresh instance on a fresh thread: one for all of them, made on a thread too. What of it
  lasts longer than a call's deadline fails that call.
- The state that a call sees is its own copy; only a call that returns in time changes what is kept.
- Whatever an environment does wrong is EnvironmentFailed, with its own exception as the cause.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from headrace.environments.loading import EnvironmentFailed
from headrace.environments.protocol import Done, Environment, Episode, Observation, Outcome, State, Task, Turn
from headrace.wire.encodable import encodable

log = logging.getLogger("headrace.environments")

T = TypeVar("T")

MAX_STATE_BYTES = 256 * 1024
"""A state travels with parked work, one for each trajectory."""
RESERVED = frozenset({"turns"})
"""Names of `env/<name>/mean` in the run log that are not the environment's."""
_ANSWERS_S = 1.0
"""A loop that has not answered for so long, right after a deadline, is blocked."""
_MAKE_S = 60.0
"""Longest making of a fresh instance; past it the next call begins with another one."""


class EnvironmentHost:
    """`make` makes an instance; it is called again should the one in use block for ever."""

    def __init__(self, make: Callable[[], Environment], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._place: _Place | None = _Place(make())
        """None: the one before was given up."""
        self._making: asyncio.Task[None] | None = None
        self._why_none = ""

    async def start(self, task: Task) -> State:
        state = await self._call("start", lambda e: e.start(task))
        return _looked_at("start", lambda: checked_state(state))

    async def step(self, turn: Turn) -> tuple[Observation | Done, State]:
        """The answer, and the state after it; `turn.state` is changed by the environment."""
        answer = await self._call("step", lambda e: e.step(turn))
        return _looked_at("step", lambda: (_checked_answer(answer), checked_state(turn.state)))

    async def finish(self, episode: Episode) -> Outcome:
        outcome = await self._call("finish", lambda e: e.finish(episode))
        return _looked_at("finish", lambda: _checked_outcome(outcome))

    async def _call(self, what: str, call: Callable[[Environment], Coroutine[Any, Any, T]]) -> T:
        deadline = time.monotonic() + self._timeout_s
        place = await self._usable()
        future = asyncio.run_coroutine_threadsafe(_guarded(call, place.environment), place.loop)
        waiting = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=max(deadline - time.monotonic(), 0.0))
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
            raise EnvironmentFailed(f"{what} raised {_shown(error)}") from error
        return waiting.result()

    async def _leave_if_blocked(self, place: _Place) -> None:
        if await place.answers() or self._place is not place:  # several calls may find out at once
            return
        self._place = None
        log.error("the environment blocks its thread and was given up; a fresh one takes the next calls")
        # Calls that it still has are past their deadlines by then.
        asyncio.get_running_loop().call_later(self._timeout_s, place.leave)

    async def _usable(self) -> _Place:
        """The instance in use, or a fresh one. Raises EnvironmentFailed when there is none in time."""
        if self._place is None:
            if self._making is None:
                self._why_none = "its making has not ended"
                self._making = asyncio.create_task(self._make_another())
            await asyncio.wait({self._making}, timeout=self._timeout_s)
        if self._place is None:
            raise EnvironmentFailed(
                f"the environment blocked its thread and there is no fresh instance yet: {self._why_none}"
            )
        return self._place

    async def _make_another(self) -> None:
        made: concurrent.futures.Future[Environment] = concurrent.futures.Future()
        made.set_running_or_notify_cancel()

        def make() -> None:
            try:
                made.set_result(self._make())
            except BaseException as error:  # user code
                made.set_exception(RuntimeError(f"its making raised {_shown(error)}"))

        threading.Thread(target=make, name="environment-making", daemon=True).start()
        try:
            # The future of a thread cannot be cancelled: what is made too late is let go of.
            self._place = _Place(await asyncio.wait_for(asyncio.wrap_future(made), _MAKE_S))
        except TimeoutError:
            self._why_none = f"its making took longer than {_MAKE_S:g} s"
        except Exception as error:  # the constructor is the user's: the next calls fail with what it raised
            self._why_none = str(error)
        finally:
            self._making = None
        if self._place is None:
            log.error("no fresh environment", extra={"why": encodable(self._why_none)})


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

    def leave(self) -> None:
        """Let the thread end, should it ever come back from what blocks it."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def answers(self) -> bool:
        """Whether the loop still turns."""
        answer: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(answer.set_result, None)
        done, _ = await asyncio.wait({asyncio.wrap_future(answer)}, timeout=_ANSWERS_S)
        return bool(done)


def _looked_at(what: str, look: Callable[[], T]) -> T:
    """What `look` finds. The objects are the environment's: to look at one can raise anything."""
    try:
        return look()
    except EnvironmentFailed:
        raise
    except Exception as error:  # properties and conversions of the user's own classes
        raise EnvironmentFailed(f"{what} returned what cannot be read: {_shown(error)}") from error


def _checked_answer(answer: Any) -> Observation | Done:
    if not isinstance(answer, Observation | Done):
        raise EnvironmentFailed(f"step returned {_shown(answer)}; return an Observation or Done()")
    if isinstance(answer, Observation):
        if not isinstance(answer.text, str):
            raise EnvironmentFailed(f"step: the Observation's text is {_shown(answer.text)}; give a str")
        messages = answer.messages
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise EnvironmentFailed(f"step: the Observation's messages are {_shown(messages)}; give a list")
        for message in messages:
            if not isinstance(message, Mapping):
                raise EnvironmentFailed(
                    f"step: a message of the Observation is {_shown(message)}; give a dictionary with role "
                    "and content"
                )
    return answer


def _checked_outcome(outcome: Any) -> Outcome:
    if not isinstance(outcome, Outcome):
        raise EnvironmentFailed(f"finish returned {_shown(outcome)}; return an Outcome")
    reward = None if outcome.reward is None else _number(outcome.reward, "reward")
    metrics = _numbers(outcome.metrics, "metrics")
    if taken := sorted(RESERVED & metrics.keys()):
        raise EnvironmentFailed(
            f"finish: metrics has {', '.join(taken)}, which is counted anyhow as env/{taken[0]}/mean; give "
            "it another name or leave it out"
        )
    return Outcome(reward, _numbers(outcome.reward_parts, "reward_parts"), metrics)


def _shown(value: object) -> str:
    """Its `repr`, cut; also of what has none."""
    try:
        return f"{value!r:.200}"
    except Exception:  # a `__repr__` of the user's: the name of the type does for a message
        return f"a {type(value).__name__}"


def checked_state(state: Any) -> State:
    """A copy of `state`, as it would come back from another process. Raises EnvironmentFailed."""
    if not isinstance(state, dict):
        raise EnvironmentFailed(f"the state is {_shown(state)}; it must be a dictionary")
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
        raise EnvironmentFailed(f"finish: {what} is {_shown(value)}, which is no number") from error
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise EnvironmentFailed(f"finish: {what} is {number}")
    return number


def _numbers(values: Mapping[str, float], what: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvironmentFailed(f"finish: {what} is {_shown(values)}; it must be a dictionary")
    return {encodable(str(k)): _number(v, f"{what}[{k!r}]") for k, v in values.items()}
