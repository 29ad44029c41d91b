"""Try the reward before a run: whether it loads, and what it says about a few real rows.

Users' functions run in processes of their own here as in the run, so whatever they do (print, exit, hang,
crash) becomes a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.config.run import RunConfig
from headrace.data.rows import Row
from headrace.rewards import RewardError, Scorer, build_scorer
from headrace.rewards.prompt import with_prompt


def is_file(path: str) -> bool:
    """Whether `path` means a Python file rather than an importable module."""
    return path.endswith(".py")


def problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the reward; nothing when every source loads. No service is asked."""

    async def load() -> None:
        scorer = build_scorer(config)
        try:
            await scorer.start()
        finally:
            await scorer.close()

    try:
        asyncio.run(load())
    except RewardError as error:
        yield str(error)


@dataclass(frozen=True)
class Tried:
    """What the reward said about one answer to one row."""

    row: Row
    solution: str
    reward: float | None
    """None: it failed, see `problem`."""
    parts: dict[str, float]
    problem: str = ""


def try_rows(config: RunConfig, rows: Sequence[Row]) -> list[Tried]:
    """For each row the reward of its ground truth as the response, and that of an empty response.

    Raises RewardError when a source cannot be loaded; what fails on a row is in its `problem`.
    """

    async def run() -> list[Tried]:
        scorer = build_scorer(config)
        try:
            await scorer.start()
            answers = [(row, text) for row in rows for text in (row.ground_truth, "")]
            return list(await asyncio.gather(*(_try(scorer, row, text) for row, text in answers)))
        finally:
            await scorer.close()

    return asyncio.run(run())


async def _try(scorer: Scorer, row: Row, solution: str) -> Tried:
    info = {**with_prompt(row), "finish_reason": "stop"}
    try:
        reward, parts = await scorer.score(row.data_source, solution, row.ground_truth, info)
    except RewardError as error:
        return Tried(row, solution, None, {}, str(error))
    return Tried(row, solution, reward, parts)
