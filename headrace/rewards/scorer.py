"""The run's reward: a weighted sum of its sources."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.config.reward import REWARDS
from headrace.rewards.function import RewardError
from headrace.rewards.source import Judged, Response, Source

if TYPE_CHECKING:
    from headrace.config.reward import RewardSource
    from headrace.config.run import RunConfig

ONLY = ""
"""Name of the source that a `custom_reward_function` becomes. Its parts keep their own names."""


@dataclass(frozen=True)
class Weighted:
    source: Source
    weight: float = 1.0


class Scorer:
    """Judges responses with all sources concurrently. If one source fails, the whole score fails."""

    def __init__(self, sources: Mapping[str, Weighted]) -> None:
        """`sources`: by name. A source named `ONLY` must be the only one."""
        self._sources = dict(sources)

    async def start(self) -> None:
        """Load functions and look up tokens. Raises RewardError for the first unusable source."""
        await asyncio.gather(*(w.source.start() for w in self._sources.values()))

    async def close(self) -> None:
        """Release processes and connections. Calls in progress fail."""
        await asyncio.gather(*(w.source.close() for w in self._sources.values()))

    async def score(
        self, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> tuple[float, dict[str, float]]:
        """Return (reward, parts). Raises RewardError, with the function's traceback in its text."""
        judged = await self._judge(Response(data_source, solution, ground_truth, extra_info))
        return judged.score, judged.parts

    async def judge(
        self, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> tuple[float, str]:
        """Return (reward, answer for majority votes). The answer is the first source's `pred`, or else the
        whole solution. Raises as `score` does."""
        judged = await self._judge(Response(data_source, solution, ground_truth, extra_info))
        return judged.score, solution if judged.answer is None else judged.answer

    async def _judge(self, response: Response) -> Judged:
        if (only := self._sources.get(ONLY)) is not None:
            return await only.source.judge(response)
        calls = [self._named(name, w.source, response) for name, w in self._sources.items()]
        found = await asyncio.gather(*calls, return_exceptions=True)
        for result in found:  # raised only now, when all have ended: no call outlives a failed response
            if isinstance(result, BaseException):
                raise result
        judged = {name: j for name, j in zip(self._sources, found, strict=True) if isinstance(j, Judged)}
        return add_up(judged, {name: w.weight for name, w in self._sources.items()})

    @staticmethod
    async def _named(name: str, source: Source, response: Response) -> Judged:
        try:
            return await source.judge(response)
        except RewardError as error:
            raise RewardError(f"reward.sources.{name}: {error.args[0]}", error.detail) from error


def add_up(judged: Mapping[str, Judged], weights: Mapping[str, float]) -> Judged:
    """Compute the weighted sum. Its parts are each source's score as `name` and its parts as `name/part`."""
    score = sum(weights[name] * j.score for name, j in judged.items())
    if not math.isfinite(score) or abs(score) > 3.4e38:
        raise RewardError(f"the weighted sum of the rewards is {score}")
    parts: dict[str, float] = {}
    for name, j in judged.items():
        parts[name] = j.score
        parts.update({f"{name}/{key}": value for key, value in j.parts.items()})
    answers = [j.answer for j in judged.values() if j.answer is not None]
    return Judged(float(score), parts, answers[0] if answers else None)


def build_scorer(config: RunConfig) -> Scorer:
    """Build the configured reward, without loading or starting anything. Raises RewardError."""
    from headrace.rewards.pool import FunctionPool

    custom, reward = config.custom_reward_function, config.reward
    limits = reward.max_processes, reward.memory_limit_bytes
    if custom.path is not None:
        pool = FunctionPool(custom.path, custom.name, "custom_reward_function", custom.timeout_s, *limits)
        return Scorer({ONLY: Weighted(pool)})
    found = {name: _source(f"reward.sources.{name}", s, limits) for name, s in reward.sources.items()}
    return Scorer({name: Weighted(found[name], s.weight) for name, s in reward.sources.items()})


def _source(key: str, s: RewardSource, limits: tuple[int, int]) -> Source:
    from headrace.rewards.pool import FunctionPool

    if s.kind == "http" or s.kind == "reward_model":
        try:
            from headrace.rewards.remote import HttpReward, RewardModel
        except ImportError as error:
            raise RewardError(f"{key}: kind {s.kind} needs the package httpx: {error}") from None
        assert s.url is not None  # config_reward refuses it
        common = (key, s.url, s.timeout_s, s.concurrency, s.retries, s.token_env)
        if s.kind == "http":
            return HttpReward(*common)
        return RewardModel(*common, model=s.model, endpoint=s.endpoint, index=s.index)
    if s.kind == "function":
        assert s.path is not None  # config_reward refuses it
        return FunctionPool(s.path, s.name, key, s.timeout_s, *limits)
    module, _, name = str(REWARDS.reference(s.kind)).partition(":")
    return FunctionPool(module, name, key, s.timeout_s, *limits)
