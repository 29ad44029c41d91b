"""Keeper: shows that the run lives, and notes how far its ledger is.

Another run may take the place of a dead one of the same name (`headrace run` with trainer.resume=never),
never of one that gives signs of life.
"""

from __future__ import annotations

import asyncio

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.record import LedgerRecord

PERIOD_S = 1.0


class Keeper:
    """The loop."""

    name = "keeper"

    def __init__(self, ledger: AsyncLedger, record: LedgerRecord) -> None:
        self._ledger = ledger
        self._record = record

    async def step(self) -> float:
        await self._ledger.run(ops.alive())
        await asyncio.to_thread(self._record.keep, self._ledger.seen)
        return PERIOD_S

    def interrupted(self) -> None:
        """Nothing is kept between steps that an outage could make wrong."""
