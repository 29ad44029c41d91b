"""What the tasks of one rollouter could not handle: one line of it in the log, however many tasks it hits.

A dead engine or ledger ends all running work at once. What is understood is told by its reason alone;
anything else is somebody's mistake and comes with a traceback, once for each place that it was raised at.
"""

from __future__ import annotations

import logging
import traceback

from headrace.ledger.client import LedgerError
from headrace_rollouter.inference.engine import EngineFailed

UNDERSTOOD = (EngineFailed, LedgerError)


class Failures:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[tuple[str, str]] = set()
        self.fatal: BaseException | None = None
        """The first that the process must end with."""

    def add(self, event: str, error: BaseException, *, fatal: bool, **where: object) -> None:
        """`fatal`: the process must end; `where`: what the line tells beside the event and the reason."""
        if fatal and self.fatal is None:
            self.fatal = error
        understood = isinstance(error, UNDERSTOOD)
        kind = (type(error).__qualname__, "" if understood else _raised_at(error))
        if kind not in self._told:
            self._told.add(kind)
            reason = {"reason": str(error)[:1000], **where}
            self._log.error(event, exc_info=None if understood else error, extra=reason)


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
