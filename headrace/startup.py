"""Waiting at start: services start in any order, so each waits for what it needs, with a deadline.

What it needs first is a ledger, set up for the run that its own configuration describes.
"""

from __future__ import annotations

import asyncio
import time

from headrace import run_identity
from headrace.config import RunConfig
from headrace.config_load import ConfigError
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerError, LedgerUnavailable, SyncLedger

_POLL_S = 0.2


def _is_too_early(error: LedgerError) -> bool:
    return not isinstance(error, LedgerUnavailable) and "is not configured" in str(error)


def _gave_up(seconds: float) -> LedgerUnavailable:
    return LedgerUnavailable(f"the queue service did not set up the run within {seconds:g} s; see its log")


def _recognise(fingerprint: str, config: RunConfig) -> None:
    if lines := run_identity.changes(fingerprint, config):
        raise ConfigError(lines)


async def until_configured(ledger: AsyncLedger, config: RunConfig) -> None:
    """Until the queue service has set up the run. Raises LedgerUnavailable; ConfigError for another run."""
    seconds = config.services.start_timeout_s
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _recognise(await ledger.run(ops.fingerprint()), config)
        except LedgerError as error:
            if not _is_too_early(error):
                raise
            if time.monotonic() > deadline:
                raise _gave_up(seconds) from None
        await asyncio.sleep(_POLL_S)


def wait_until_configured(ledger: SyncLedger, config: RunConfig) -> None:
    """The same for code that runs in threads."""
    seconds = config.services.start_timeout_s
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _recognise(ledger.run(ops.fingerprint()), config)
        except LedgerError as error:
            if not _is_too_early(error):
                raise
            if time.monotonic() > deadline:
                raise _gave_up(seconds) from None
        time.sleep(_POLL_S)
