"""Holds the commit until a running validation has finished, for at most `val.max_delay_s`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger

log = logging.getLogger("headrace.coordinator")


async def let_finish(ledger: AsyncLedger, limit_s: float, is_anybody_connected: Callable[[], bool]) -> None:
    """Wait for the validation. After `limit_s` seconds it is closed, and the rest stays unfinished."""
    deadline = time.monotonic() + limit_s
    while (status := await ledger.run(ops.val_status())).open:
        is_late = time.monotonic() > deadline
        if is_late or (status.done == 0 and await _is_deserted(ledger, is_anybody_connected)):
            log.warning("validation unfinished", extra={"version": status.version, "done": status.done})
            await ledger.run(ops.val_close(status.version))
            return
        await asyncio.sleep(0.05)


async def _is_deserted(ledger: AsyncLedger, is_anybody_connected: Callable[[], bool]) -> bool:
    """Whether nobody is connected and nobody holds a lease.

    Connections alone do not tell: after a restart of this process members reconnect one by one, and the
    trainer may be the first.
    """
    return not is_anybody_connected() and not (await ledger.run(ops.stats())).members
