"""The reward of a trajectory: what is measured of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.metrics.rollouter import REWARD_SECONDS
from headrace.wire.payloads import FinishReason, Prompt
from headrace_rollouter.generation.scoring import Scoring
from tests.fast.rollouter.test_rollouter_parts import config

PROMPT = Prompt("s-1", 1, 0, 0, np.asarray([1, 2], np.int32), "source", "42")


class Scorer:
    """Raises what it is given, or rewards with 1."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def score(self, *_: Any) -> tuple[float, dict[str, float]]:
        if self._error is not None:
            raise self._error
        return 1.0, {}

    async def judge(self, *_: Any) -> tuple[float, str]:
        return 1.0, "42"


def calls() -> float:
    (family,) = REWARD_SECONDS.collect()
    return next(s.value for s in family.samples if s.name == "headrace_reward_call_seconds_count")


def scoring(scorer: Scorer) -> Scoring:
    async def outcome(*_: Any) -> None:
        return None

    trajectories: Any = SimpleNamespace(outcome=outcome, has_environment=False)
    return Scoring(config(), scorer, lambda ids: "", trajectories)  # type: ignore[arg-type]


def trajectory() -> Any:
    return SimpleNamespace(token_ids=np.asarray([3]), finish_reason=FinishReason.STOP)


def test_every_call_of_the_reward_is_timed() -> None:
    before = calls()
    asyncio.run(scoring(Scorer()).group(PROMPT, [trajectory(), trajectory()], [0, 1]))
    assert calls() - before == 2
    asyncio.run(scoring(Scorer()).judge(PROMPT, trajectory(), 0))
    assert calls() - before == 3
    with pytest.raises(ValueError, match="no such task"):
        asyncio.run(scoring(Scorer(ValueError("no such task"))).group(PROMPT, [trajectory()], [0]))
    assert calls() - before == 4, "also of one that fails: it may be a time-out"
