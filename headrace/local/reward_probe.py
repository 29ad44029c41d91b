"""Try the reward before a run: load it, and score a few real rows.

As in a run, users' functions run in separate processes, so whatever they do (print, exit, hang, crash)
becomes a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.config.run import RunConfig
from headrace.data.rows import DataRow
from headrace.rewards import RewardError, Scorer, build_scorer
from headrace.rewards.prompt import with_prompt


def is_file(path: str) -> bool:
    """Whether `path` means a Python file rather than an importable module."""
    return path.endswith(".py")


def problems(config: RunConfig) -> Iterator[str]:
    """Problems with the reward; none if every source loads. Sends nothing to reward services."""

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
    """The reward's result for one answer to one row."""

    row: DataRow
    solution: str
    reward: float | None
    """None if scoring failed; see `problem`."""
    parts: dict[str, float]
    problem: str = ""


def try_rows(config: RunConfig, rows: Sequence[DataRow]) -> list[Tried]:
    """Score, for each row, its ground truth and then an empty response.

    Raises RewardError if a source cannot be loaded. A failure on one row is in its `problem`.
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


async def _try(scorer: Scorer, row: DataRow, solution: str) -> Tried:
    info = {**with_prompt(row), "finish_reason": "stop"}
    try:
        reward, parts = await scorer.score(row.data_source, solution, row.ground_truth, info)
    except RewardError as error:
        return Tried(row, solution, None, {}, str(error))
    return Tried(row, solution, reward, parts)
