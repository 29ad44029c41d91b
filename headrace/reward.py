"""The reward seam: verl's `compute_score`, found by path and name, called with a deadline.

`compute_score(data_source, solution_str, ground_truth, extra_info)` may be a plain function or a
coroutine; it returns a number or a dictionary with `score` (other numbers in it are kept as metrics).
`extra_info` holds the row's own, plus `finish_reason` ("stop" or "length").
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RewardFunction = Callable[..., Any]


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
    except Exception as error:  # user code: whatever its import raises is the answer
        raise RewardError(f"custom_reward_function.path: {path} does not import: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"custom_reward_function.name: {path} has no function {name!r}")
    try:
        inspect.signature(function).bind("source", "solution", "truth", {})
    except TypeError as error:
        raise RewardError(
            f"custom_reward_function: {path}:{name} must accept "
            f"(data_source, solution_str, ground_truth, extra_info): {error}"
        ) from error
    return function


def parse_score(result: Any) -> tuple[float, dict[str, float]]:
    """(score, parts) of what the function returned. Raises RewardError when it is no finite number."""
    parts: dict[str, float] = {}
    score = result
    if isinstance(result, dict):
        if "score" not in result:
            raise RewardError(f"the reward returned a dictionary without 'score': keys {sorted(result)[:10]}")
        score = result["score"]
        parts = {
            str(k): float(v)
            for k, v in result.items()
            if k != "score" and isinstance(v, int | float) and math.isfinite(v)
        }
    try:
        value = float(score)
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward returned {score!r}, which is no number") from error
    if not math.isfinite(value):
        raise RewardError(f"the reward returned {value}")
    return value, parts


class Scorer:
    """Calls one reward function off the event loop. A call past its deadline is given up, not waited for."""

    def __init__(self, function: RewardFunction, timeout_s: float, threads: int = 4) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reward")

    async def score(
        self, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> tuple[float, dict[str, float]]:
        """Raises RewardError, with the function's own exception as its cause."""
        args = (data_source, solution, ground_truth, extra_info)
        loop = asyncio.get_running_loop()
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await asyncio.wait_for(self._function(*args), self._timeout_s)
            else:
                call = loop.run_in_executor(self._threads, lambda: self._function(*args))
                result = await asyncio.wait_for(call, self._timeout_s)
        except TimeoutError as error:
            raise RewardError(f"the reward took longer than {self._timeout_s:g} s") from error
        except Exception as error:  # user code
            raise RewardError(f"the reward raised {error!r}") from error
        return parse_score(result)
