"""Heartbeats of one rollouter, sent from a thread of their own.

Loading an engine blocks the event loop for longer than a lease, so the loop cannot send them. Once `run` has
begun, the beats stop when the loop has been stuck for a lease: a process in which only this thread runs is as
good as dead.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from headrace.ledger import ops
from headrace.ledger.client import LedgerError, LedgerUnavailable, SyncLedger

log = logging.getLogger("headrace.rollouter.beats")


class Beats:
    """Beats in a thread. `start` and `run` are called on one event loop."""

    def __init__(self, ledger: SyncLedger, owner: str, lease_s: float, outage_timeout_s: float) -> None:
        """`ledger` belongs to this thread and must not retry: the next beat is the retry."""
        self._ledger = ledger
        self._owner = owner
        self._lease_s = lease_s
        self._outage_timeout_s = outage_timeout_s
        self._period_s = min(1.0, lease_s / 5)
        self._count = 0
        self._since = -1
        self._turned_at: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self.expired = asyncio.Event()
        """This incarnation was expired while alive. Its work belongs to others now."""

    def start(self) -> None:
        """Start beating."""
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()

    async def run(self) -> None:
        """Report the event loop's progress, which beats depend on from now on. Call it once all is loaded.

        Raises what ended the thread: LedgerUnavailable after an outage of `outage_timeout_s`, LoginRefused or
        LedgerWentBack.
        """
        while not self._failure.done():
            self._turned_at = time.monotonic()
            await asyncio.wait({self._failure}, timeout=self._period_s)
        await self._failure

    def stop(self) -> None:
        """Stop beating, so that a late beat does not re-register a member that has left."""
        self._over.set()
        self._thread.join(timeout=self._period_s + 10.0)  # the socket timeout bounds a beat in progress
        self._ledger.close()

    # -- thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            heard = time.monotonic()
            while not self._over.is_set():
                try:
                    if self._gets_on():
                        self._beat()
                    heard = time.monotonic()
                except LedgerUnavailable:
                    if time.monotonic() - heard > self._outage_timeout_s:
                        raise LedgerUnavailable(
                            f"the ledger at {self._ledger.address} was not reached for "
                            f"{self._outage_timeout_s:g} s; check that the server runs"
                        ) from None
                self._over.wait(self._period_s)
        except LedgerError as error:
            self._loop.call_soon_threadsafe(self._fail, error)

    def _gets_on(self) -> bool:
        turned_at = self._turned_at
        return turned_at is None or time.monotonic() - turned_at < self._lease_s

    def _beat(self) -> None:
        self._count += 1
        since = self._ledger.run(ops.beat(self._owner, self._count))
        if self._since not in (-1, since):
            log.warning("expired while it lived", extra={"owner": self._owner})
            self._loop.call_soon_threadsafe(self.expired.set)
        self._since = since

    def _fail(self, error: LedgerError) -> None:
        if not self._failure.done():  # done: cancelled, nobody waits for it any more
            self._failure.set_exception(error)
