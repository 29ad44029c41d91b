"""Runs an environment's coroutines alongside the engine, each call with a deadline.

What this module guarantees:

- The environment has its own event loop and thread. One that blocks delays neither the engine nor the
  coordinator's commands. If it never returns, the calls in progress fail at their deadlines. Later calls
  share a fresh instance on a fresh thread. The instance is made on a thread too, and a call whose deadline
  passes meanwhile fails.
- Each call sees its own copy of the state. Only a call that returns in time changes the stored state.
- Whatever an environment does wrong is raised as EnvironmentFailed, with its own exception as the cause.
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
"""Largest state as JSON. Parked work carries one state per trajectory."""
RESERVED = frozenset({"turns"})
"""Names that an environment may not use: Headrace itself logs them as `env/<name>/mean`."""
_ANSWERS_S = 1.0
"""A loop that does not answer within this time after a missed deadline counts as blocked."""
_MAKE_S = 60.0
"""Longest construction of a fresh instance. After that the next call starts another one."""


class EnvironmentHost:
    """Hosts one environment. `make` creates an instance, and another if the current one blocks forever."""

    def __init__(self, make: Callable[[], Environment], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._place: _Place | None = _Place(make())
        """None: the previous instance was abandoned."""
        self._making: asyncio.Task[None] | None = None
        self._why_none = ""

    async def start(self, task: Task) -> State:
        state = await self._call("start", lambda e: e.start(task))
        return _looked_at("start", lambda: checked_state(state))

    async def step(self, turn: Turn) -> tuple[Observation | Done, State]:
        """Return the answer and the new state. The environment modifies `turn.state`."""
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
                waiting.cancel()  # cancels the coroutine on the other loop too
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
        # Calls still running on it will be past their deadlines then.
        asyncio.get_running_loop().call_later(self._timeout_s, place.leave)

    async def _usable(self) -> _Place:
        """The current instance, or a fresh one. Raises EnvironmentFailed when none is ready in time."""
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
            # The thread cannot be cancelled. An instance that it finishes too late is dropped.
            self._place = _Place(await asyncio.wait_for(asyncio.wrap_future(made), _MAKE_S))
        except TimeoutError:
            self._why_none = f"its making took longer than {_MAKE_S:g} s"
        except Exception as error:  # the constructor is user code; the waiting calls fail with its error
            self._why_none = str(error)
        finally:
            self._making = None
        if self._place is None:
            log.error("no fresh environment", extra={"why": encodable(self._why_none)})


async def _guarded(call: Callable[[Environment], Coroutine[Any, Any, T]], environment: Environment) -> T:
    try:
        return await call(environment)
    except (SystemExit, KeyboardInterrupt) as error:  # would end the loop for all calls
        raise RuntimeError(f"it raised {error!r}") from error


class _Place:
    """An environment instance with its event loop and thread."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="environment", daemon=True).start()

    def leave(self) -> None:
        """Let the thread end if it ever returns from the blocking call."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def answers(self) -> bool:
        """Whether the loop still runs callbacks."""
        answer: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(answer.set_result, None)
        done, _ = await asyncio.wait({asyncio.wrap_future(answer)}, timeout=_ANSWERS_S)
        return bool(done)


def _looked_at(what: str, look: Callable[[], T]) -> T:
    """Return what `look` returns. It inspects objects of the environment, which can raise anything."""
    try:
        return look()
    except EnvironmentFailed:
        raise
    except Exception as error:  # properties and conversions of user classes
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
    """The value's `repr`, truncated, or its type's name if `repr` fails."""
    try:
        return f"{value!r:.200}"
    except Exception:  # the user's `__repr__` can raise anything
        return f"a {type(value).__name__}"


def checked_state(state: Any) -> State:
    """Copy `state` through JSON, as if it came from another process. Raises EnvironmentFailed."""
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
