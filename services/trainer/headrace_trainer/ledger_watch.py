"""Watches the ledger and shows there that the trainer is alive: rank 0 may not call Redis for minutes during
an update."""

from __future__ import annotations

import threading

from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, LedgerWentBack, SyncLedger
from headrace.ledger.marks import Marks

PERIOD_S = 1.0
_TIMEOUT_S = 2.0
"""Of one call: the end of the trainer waits for it."""


class LedgerWatch:
    """A thread that runs from construction until `close`."""

    def __init__(self, url: str, run: str, seen: Marks) -> None:
        self._ledger = SyncLedger(connect(url, _TIMEOUT_S), run, retry_s=0.0, seen=seen)
        self._failure: LedgerWentBack | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises LedgerWentBack once the thread has seen it."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._over.set()
        self._thread.join(2 * _TIMEOUT_S + PERIOD_S)

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            try:
                self._ledger.run(ops.alive())
            except LedgerWentBack as error:
                self._failure = error
                break
            except LedgerError:
                pass  # an outage or a refused password: left to the code that needs Redis
        self._ledger.close()
