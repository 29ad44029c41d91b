"""Wait for dependencies at startup. Services start in any order, so each waits, with a deadline.

The first dependency is the ledger: a Redis that answers, holding the run that the configuration describes.
Each dependency waited for is logged once. An error that waiting does not fix, such as a wrong password, ends
the start at once.
"""

from __future__ import annotations

import asyncio
import logging
import time

from headrace.config import identity
from headrace.config.loading import ConfigError
from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerError, LedgerUnavailable, LedgerWentBack, SyncLedger

log = logging.getLogger("headrace.startup")

_POLL_S = 0.2


class _Start:
    """A service's wait for the ledger at `address`, for at most `services.start_timeout_s`."""

    def __init__(self, config: RunConfig, address: str) -> None:
        self._seconds = config.services.start_timeout_s
        self._deadline = time.monotonic() + self._seconds
        self._address = address
        self._told: set[str] = set()

    def waits(self, error: LedgerError) -> None:
        """Note a failed attempt. Raises LedgerUnavailable when the time is up, and `error` itself if waiting
        does not help."""
        if isinstance(error, LedgerWentBack):
            raise error
        if isinstance(error, LedgerUnavailable):
            what = f"an answer of Redis at {self._address}"
            fix = "check that the server runs, and that HEADRACE_REDIS_URL leads to it"
        elif "is not configured" in str(error):
            what, fix = "the queue service to set up the run", "see its log"
        else:
            raise error
        if time.monotonic() > self._deadline:
            waited = f"the start has waited {self._seconds:g} s for {what} (services.start_timeout_s)"
            raise LedgerUnavailable(f"{waited}; {fix}") from None
        if what not in self._told:
            self._told.add(what)
            log.info("waiting", extra={"for": what, "at_most_s": self._seconds})


def _recognise(fingerprint: str, config: RunConfig) -> None:
    if lines := identity.changes(fingerprint, config):
        raise ConfigError(lines)


async def until_configured(ledger: AsyncLedger, config: RunConfig) -> None:
    """Wait until Redis answers and the queue service has set up the run.

    `ledger`: with `retry_s` 0, because retrying happens here. Raises LedgerUnavailable, LedgerWentBack, and
    ConfigError for another run.
    """
    start = _Start(config, ledger.address)
    while True:
        try:
            return _recognise(await ledger.run(ops.fingerprint()), config)
        except LedgerError as error:
            start.waits(error)
        await asyncio.sleep(_POLL_S)


def wait_until_configured(ledger: SyncLedger, config: RunConfig) -> None:
    """The synchronous version of `until_configured`."""
    start = _Start(config, ledger.address)
    while True:
        try:
            return _recognise(ledger.run(ops.fingerprint()), config)
        except LedgerError as error:
            start.waits(error)
        time.sleep(_POLL_S)
