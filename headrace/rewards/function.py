"""Loads verl-style `compute_score` functions by path and name, and parses what they return.

`compute_score(data_source, solution_str, ground_truth, extra_info)` may be a plain function or a coroutine
function. If it has any of these parameter names, in any order, or only `**kwargs`, it gets the arguments that
it takes by name. Otherwise it gets all four by position. It returns a number, or a dictionary with `score`
whose other numbers are kept as metrics. `extra_info` holds the row's own, plus `finish_reason` ("stop" or
"length").

This module and those of ours that it imports need the standard library only, because the processes that run
users' functions import it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from headrace.plugins.user_code import UserCodeError, load_user
from headrace.wire.encodable import encodable

RewardFunction = Callable[..., Any]

_BY_NAME = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
_BY_POSITION = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


class RewardError(Exception):
    """A reward could not be loaded, raised, took too long, or returned no finite number.

    `detail`: the traceback of the user's function, or "".
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}\n{self.detail}" if self.detail else message


def load_reward(path: str, name: str, key: str = "custom_reward_function") -> RewardFunction:
    """Load the function `name` from a Python file or an importable module. Raises RewardError.

    `key`: the configuration section that names it, for error messages.
    """
    try:
        module = load_user(path)
    except UserCodeError as error:
        raise RewardError(f"{key}.path: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"{key}.name: {path} has no function {name!r}")
    try:
        bind_arguments(function, "source", "solution", "truth", {})
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise RewardError(
            f"{key}: {path}:{name} must accept data_source, solution_str, ground_truth and extra_info, by "
            f"these names or four by position: {error}"
        ) from error
    loaded: RewardFunction = function
    return loaded


def bind_arguments(
    function: RewardFunction, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]
) -> inspect.BoundArguments:
    """Bind the arguments as the module's docstring says. Raises TypeError or ValueError.

    They are bound by name when a parameter has one of verl's names, or when there is `**kwargs` and no
    positional parameter. Otherwise they are bound by position.
    """
    signature = inspect.signature(function)
    named = {
        "data_source": data_source,
        "solution_str": solution,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    taken = {name: value for name, value in named.items() if kinds.get(name) in _BY_NAME}
    if inspect.Parameter.VAR_KEYWORD in kinds.values() and (taken or not _BY_POSITION & set(kinds.values())):
        return signature.bind(**named)
    return signature.bind(**taken) if taken else signature.bind(*named.values())


def parse_score(result: Any) -> tuple[float, dict[str, float]]:
    """Return (score, parts) of a function's result. Raises RewardError unless the score is finite."""
    if not isinstance(result, dict):
        return _number(result), {}
    if "score" not in result:
        keys = sorted(str(key) for key in result)[:10]
        raise RewardError(f"the reward returned a dictionary without 'score': keys {keys}")
    parts: dict[str, float] = {}
    for key, value in result.items():
        if key != "score":
            try:
                parts[encodable(str(key))] = _number(value)
            except RewardError:
                continue  # not a number, so not a metric; only the score is required to be one
    return _number(result["score"]), parts


def _number(value: Any) -> float:
    """Convert to a finite number within float32's range, the wire format. Raises RewardError."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        shown = "a huge number" if isinstance(value, int) else repr(value)[:200]
        raise RewardError(f"the reward returned {shown}, which is no number") from error
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise RewardError(f"the reward returned {number}")
    return number
