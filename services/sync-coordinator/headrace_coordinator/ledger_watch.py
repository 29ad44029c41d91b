"""Whether Redis still takes our password and has our ledger, and a sign of life of the run there."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerUnavailable

_EVERY_S = 1.0


async def watch_ledger(ledger: AsyncLedger) -> NoReturn:
    """Gives signs of life there. Raises LoginRefused and LedgerWentBack. An outage is the matter of whoever
    needs Redis."""
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            await ledger.run(ops.alive())
        except LedgerUnavailable:
            continue
