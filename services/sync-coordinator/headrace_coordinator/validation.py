"""The commit waits for a running validation, but no longer than `val.max_delay_s`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger

log = logging.getLogger("headrace.coordinator")


async def let_finish(ledger: AsyncLedger, limit_s: float, is_anybody_there: Callable[[], bool]) -> None:
    """What is unfinished after `limit_s` seconds is closed and stays unfinished."""
    deadline = time.monotonic() + limit_s
    while (status := await ledger.run(ops.val_status())).open:
        if time.monotonic() > deadline or (not is_anybody_there() and status.done == 0):
            log.warning("validation unfinished", extra={"version": status.version, "done": status.done})
            await ledger.run(ops.val_close(status.version))
            return
        await asyncio.sleep(0.05)
