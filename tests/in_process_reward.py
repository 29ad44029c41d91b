"""A scorer that calls a function right here, for tests of what happens with its answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headrace.rewards import RewardError, Scorer, parse_score
from headrace.rewards.scorer import ONLY, Weighted
from headrace.rewards.source import Judged, Response
from headrace.rewards.worker import answer_of


class InProcess:
    """A `Source` without a process, deadline or limit."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def start(self) -> None:
        """Nothing to load."""

    async def judge(self, response: Response) -> Judged:
        r = response
        try:
            result = self.function(r.data_source, r.solution, r.ground_truth, r.extra_info)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:  # as the real source: whatever a function raises is the sample's failure
            raise RewardError(f"the reward raised {error!r}") from error
        score, parts = parse_score(result)
        return Judged(score, parts, answer_of(result))

    async def close(self) -> None:
        """Nothing to let go of."""


def in_process(function: Callable[..., Any]) -> Scorer:
    return Scorer({ONLY: Weighted(InProcess(function))})
