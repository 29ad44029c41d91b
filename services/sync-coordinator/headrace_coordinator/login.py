"""Whether Redis still takes our password: a coordinator without a round asks it nothing for hours."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerUnavailable

_EVERY_S = 5.0


async def watch_login(ledger: AsyncLedger) -> NoReturn:
    """Raises LoginRefused once it does not. An outage is the matter of whoever needs Redis."""
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            await ledger.run(ops.fingerprint())  # of all that can be asked, the least
        except LedgerUnavailable:
            continue
