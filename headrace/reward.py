"""The reward seam: verl's `compute_score`, found by path and name, called with a deadline.

`compute_score(data_source, solution_str, ground_truth, extra_info)` may be a plain function or a
coroutine. Arguments are given by name when it has these names, in whatever order, else by position.
It returns a number or a dictionary with `score` (other numbers in it are kept as metrics).
`extra_info` holds the row's own, plus `finish_reason` ("stop" or "length").
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

RewardFunction = Callable[..., Any]

_CANCEL_S = 1.0
"""How long a coroutine that is past its deadline may take to clean up."""


class RewardError(Exception):
    """The reward function cannot be loaded, raised, took too long, or returned no finite number."""


def load_reward(path: str, name: str) -> RewardFunction:
    """The function `name` of a Python file or an importable module. Raises RewardError."""
    try:
        if path.endswith(".py"):
            file = Path(path).resolve()
            if not file.exists():
                raise RewardError(f"custom_reward_function.path: {path} does not exist")
            spec = importlib.util.spec_from_file_location(f"headrace_reward_{file.stem}", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(path)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # user code: whatever its import raises is the answer
        raise RewardError(f"custom_reward_function.path: {path} does not import: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"custom_reward_function.name: {path} has no function {name!r}")
    try:
        _arguments(function, "source", "solution", "truth", {})
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise RewardError(
            f"custom_reward_function: {path}:{name} must accept "
            f"(data_source, solution_str, ground_truth, extra_info): {error}"
        ) from error
    return function


def _arguments(
    function: RewardFunction, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]
) -> inspect.BoundArguments:
    """By name when the function has verl's names, else by position. Raises TypeError or ValueError."""
    signature = inspect.signature(function)
    named = {
        "data_source": data_source,
        "solution_str": solution,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    if named.keys() <= signature.parameters.keys():
        return signature.bind(**named)
    return signature.bind(*named.values())


def parse_score(result: Any) -> tuple[float, dict[str, float]]:
    """(score, parts) of what the function returned. Raises RewardError when it is no finite number."""
    if not isinstance(result, dict):
        return _number(result), {}
    if "score" not in result:
        keys = sorted(str(key) for key in result)[:10]
        raise RewardError(f"the reward returned a dictionary without 'score': keys {keys}")
    parts: dict[str, float] = {}
    for key, value in result.items():
        if key != "score":
            try:
                parts[str(key)] = _number(value)
            except RewardError:
                continue  # a part that is no number is no metric; the score alone decides
    return _number(result["score"]), parts


def _number(value: Any) -> float:
    """A finite number that float32 holds too: it travels as such. Raises RewardError."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        shown = "a huge number" if isinstance(value, int) else repr(value)[:200]
        raise RewardError(f"the reward returned {shown}, which is no number") from error
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise RewardError(f"the reward returned {number}")
    return number


class Scorer:
    """Calls one reward function off the event loop, at most `threads` calls at once.

    The deadline counts from the start of a call. A call past it is given up, not waited for: its thread
    ends when it ends, and its place is free at once, so that hung calls never starve the others.
    """

    def __init__(self, function: RewardFunction, timeout_s: float, threads: int = 4) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(threads)

    async def score(
        self, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> tuple[float, dict[str, float]]:
        """Raises RewardError, with the function's own exception as its cause."""
        return parse_score(await self._call(data_source, solution, ground_truth, extra_info))

    async def judge(
        self, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> tuple[float, str]:
        """The score, and the answer that counts in a majority vote: `pred` of the function's dictionary, or
        the solution as a whole. Raises as `score`."""
        result = await self._call(data_source, solution, ground_truth, extra_info)
        answer = result.get("pred") if isinstance(result, dict) else None
        return parse_score(result)[0], solution if answer is None else str(answer)

    async def _call(
        self, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> Any:
        call = _arguments(self._function, data_source, solution, ground_truth, extra_info)
        async with self._places:
            if inspect.iscoroutinefunction(self._function):
                task = asyncio.ensure_future(self._function(*call.args, **call.kwargs))
            else:
                task = asyncio.ensure_future(_in_thread(lambda: self._function(*call.args, **call.kwargs)))
            try:
                done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task}, timeout=_CANCEL_S)
        if not done:
            raise RewardError(f"the reward took longer than {self._timeout_s:g} s")
        if task.cancelled():
            raise RewardError("the reward cancelled itself")
        error = task.exception()
        if error is not None:
            raise RewardError(f"the reward raised {error!r}") from error
        return task.result()


class _Worker(threading.Thread):
    """A daemon thread that makes one call after the other. While it hangs in one it is simply not idle."""

    idle: ClassVar[deque[_Worker]] = deque()

    def __init__(self) -> None:
        super().__init__(name="reward", daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            self.calls.get()()
            self.idle.append(self)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """`call()` in a daemon thread: one that hangs keeps nobody from ending, and no other call waiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return  # given up meanwhile
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as caught:  # user code
            error = caught
        except BaseException as caught:  # SystemExit and the like must not end anything here
            error = RuntimeError(f"it raised {caught!r}")
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop has ended; nobody waits any more

    try:
        worker = _Worker.idle.pop()
    except IndexError:  # all are busy; a thread that starts takes longer than many a reward
        worker = _Worker()
        worker.start()
    worker.calls.put(run)
    return await future
