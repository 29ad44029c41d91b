"""Waiting at start: services start in any order, so each waits for what it needs, with a deadline."""

from __future__ import annotations

import asyncio
import time

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerError, LedgerUnavailable, SyncLedger

_POLL_S = 0.2


def _is_too_early(error: LedgerError) -> bool:
    return not isinstance(error, LedgerUnavailable) and "is not configured" in str(error)


def _gave_up(seconds: float) -> LedgerUnavailable:
    return LedgerUnavailable(f"the queue service did not set up the run within {seconds:g} s; see its log")


async def until_configured(ledger: AsyncLedger, seconds: float) -> None:
    """Until the queue service has set up the run. Raises LedgerUnavailable."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            await ledger.run(ops.stats())
            return
        except LedgerError as error:
            if not _is_too_early(error):
                raise
            if time.monotonic() > deadline:
                raise _gave_up(seconds) from None
        await asyncio.sleep(_POLL_S)


def wait_until_configured(ledger: SyncLedger, seconds: float) -> None:
    """The same for code that runs in threads."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            ledger.run(ops.stats())
            return
        except LedgerError as error:
            if not _is_too_early(error):
                raise
            if time.monotonic() > deadline:
                raise _gave_up(seconds) from None
        time.sleep(_POLL_S)
