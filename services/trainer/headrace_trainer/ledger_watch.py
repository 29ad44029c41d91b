"""The trainer's eye on its ledger, and its sign of life there: an update may last for minutes in which rank 0
asks Redis nothing."""

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
    """A thread, from its making until `close`."""

    def __init__(self, url: str, run: str, seen: Marks) -> None:
        self._ledger = SyncLedger(connect(url, _TIMEOUT_S), run, retry_s=0.0, seen=seen)
        self._failure: LedgerWentBack | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises LedgerWentBack once that was seen."""
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
                pass  # an outage, a refused password: the matter of whoever needs Redis
        self._ledger.close()
