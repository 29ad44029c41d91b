"""Keeper: sends the run's heartbeat, and records how far its ledger is.

A new run may replace a dead one of the same name (`headrace run` with trainer.resume=never), but never one
that still sends heartbeats.
"""

from __future__ import annotations

import asyncio

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.record import LedgerRecord

PERIOD_S = 1.0


class Keeper:
    """The keeper's loop."""

    name = "keeper"

    def __init__(self, ledger: AsyncLedger, record: LedgerRecord) -> None:
        self._ledger = ledger
        self._record = record

    async def step(self) -> float:
        await self._ledger.run(ops.alive())
        await asyncio.to_thread(self._record.keep, self._ledger.seen)
        return PERIOD_S

    def interrupted(self) -> None:
        """Nothing to do: no state between steps can become stale in an outage."""
