"""Checks that Redis still accepts our password and has our ledger, and marks the run there as alive."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerUnavailable

_EVERY_S = 1.0


async def watch_ledger(ledger: AsyncLedger) -> NoReturn:
    """Mark the run as alive, forever. Raises LoginRefused and LedgerWentBack.

    An outage is ignored here: callers that need Redis handle it.
    """
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            await ledger.run(ops.alive())
        except LedgerUnavailable:
            continue
