"""Feeder: keeps enough prompts ready, and marks the end of the data.

Guarantees:

- A prompt is a pure function of its issue number and the run's settings. Two feeders, or one restarted after
  a crash, can only issue the same prompts. The ledger's compare-and-set on its cursor admits each number once
  and in order.
- The feeder itself keeps at most `max_ready` prompts ready. Requeued work (after a failure or an expired
  owner) may exceed that, and holds the feeder back.
- The issue that reaches `total` marks the end of the data in the same atomic step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.data.feed_order import FeedOrder
from headrace.data.rows import DataRow
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.rewards.prompt import with_prompt
from headrace.wire.payloads import Int32Array, Prompt, encode_prompt

log = logging.getLogger(__name__)

POLL_S = 0.2
IDLE_S = 1.0
CHUNK = 64
"""Prompts per script call. Keeps a call, and so every other client's wait, to a millisecond or two."""


@dataclass(frozen=True)
class PromptSource:
    """Rows with their tokens, and the order in which they are issued."""

    rows: Sequence[DataRow]
    tokens: Sequence[Int32Array]
    order: FeedOrder
    with_text: bool = False
    """The reward needs the prompts' original text in addition to their tokens."""

    def prompt(self, issue: int) -> Prompt:
        epoch, row = self.order.at(issue)
        return make_prompt(self.rows[row], self.tokens[row], f"{issue:010d}", issue, epoch, self.with_text)

    def encoded(self, start: int, count: int) -> list[bytes]:
        """Prompts `start` to `start + count - 1` as encoded messages."""
        return [encode_prompt(self.prompt(issue)) for issue in range(start, start + count)]


def make_prompt(
    row: DataRow, tokens: Int32Array, sample_id: str, issue: int, epoch: int, with_text: bool = False
) -> Prompt:
    return Prompt(
        sample_id=sample_id,
        issue=issue,
        epoch=epoch,
        row=row.index,
        token_ids=tokens,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=with_prompt(row) if with_text else row.extra_info,
    )


def next_issue(ready: int, cursor: int, max_ready: int, total: int) -> tuple[int, bool]:
    """Returns (number of prompts to issue now, whether they are the run's last)."""
    count = max(0, min(max_ready - ready, total - cursor, CHUNK))
    return count, cursor + count >= total


class Feeder:
    """The feeder's loop. `total` is the number of samples of the whole run."""

    name = "feeder"

    def __init__(self, ledger: AsyncLedger, source: PromptSource, total: int, max_ready: int) -> None:
        self._ledger = ledger
        self._source = source
        self._total = total
        self._max_ready = max_ready
        self._seen_cursor = 0

    @property
    def has_fed(self) -> bool:
        """Whether prompts are known to have been issued, by this process or an earlier one."""
        return self._seen_cursor > 0

    async def step(self) -> float:
        stats = await self._ledger.run(ops.stats())
        self._seen_cursor = stats.cursor
        if stats.end_of_data:
            return IDLE_S
        count, last = next_issue(stats.counts["ready"], stats.cursor, self._max_ready, self._total)
        if not count and not last:
            return POLL_S
        prompts = await asyncio.to_thread(self._source.encoded, stats.cursor, count)
        reply = await self._ledger.run(ops.issue(stats.cursor, prompts, last))
        if reply.status == "conflict":
            # A second feeder exists, e.g. a new replica before the old one has ended. Both issue the same.
            log.info("cursor had moved", extra={"expected": stats.cursor, "cursor": reply.cursor})
        elif last:
            log.info("all prompts are issued", extra={"total": self._total})
        self._seen_cursor = max(self._seen_cursor, reply.cursor)
        return 0.0 if count == CHUNK else POLL_S

    def interrupted(self) -> None:
        """Nothing to do: no state between steps can become stale in an outage."""
