"""A calculator as a tool: the model writes `<calc>12*7</calc>` and reads `<result>84</result>`.

A turn without a call ends the trajectory. Each call in a turn gets its own result, in order. A call that
cannot be computed gets `<result>error</result>`, which the model may learn to avoid. Expressions are integers
of at most `MAX_DIGITS` digits with + - * and parentheses, so that no call takes long.
"""

from __future__ import annotations

import ast
import operator
import re

from headrace.environments.protocol import (
    Done,
    Environment,
    Episode,
    Observation,
    Outcome,
    State,
    Task,
    Turn,
)

ERROR = "error"
MAX_DIGITS = 30
MAX_CALL = 200  # characters

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator(Environment):
    """A calculator tool.

    `role`: role of the message that holds the results, such as `tool`, which the model's chat template must
    know. None: results are plain text.
    """

    def __init__(self, role: str | None = None) -> None:
        self._role = role

    async def start(self, task: Task) -> State:
        return {"tool_calls": 0, "tool_errors": 0}

    async def step(self, turn: Turn) -> Observation | Done:
        results = [calculate(call) for call in _CALL.findall(turn.text)]
        if not results:
            return Done()
        turn.state["tool_calls"] += len(results)
        turn.state["tool_errors"] += results.count(ERROR)
        text = "".join(f"<result>{result}</result>" for result in results)
        if self._role is None:
            return Observation(text)
        return Observation(messages=[{"role": self._role, "content": text}])

    async def finish(self, episode: Episode) -> Outcome:
        return Outcome(metrics={k: float(v) for k, v in episode.state.items()})


def calculate(expression: str) -> str:
    """Evaluate an expression. Returns its value as text, or `error`."""
    if len(expression) > MAX_CALL:
        return ERROR
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ERROR
    return str(value)


def _value(node: ast.expr) -> int:
    """Evaluate a node. Raises ValueError for anything but adding, subtracting and multiplying integers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError(f"no calculation: {ast.dump(node)[:100]}")
    if abs(value) >= 10**MAX_DIGITS:
        raise ValueError("too large")
    return value
