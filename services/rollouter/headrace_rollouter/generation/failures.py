"""Logs what the tasks of one rollouter could not handle, once per cause.

A dead engine or ledger ends all running tasks at once, and still gets one line in the log. A known error is
logged by its reason alone. Any other is a bug and gets a traceback, once per place that raised it.
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
        """The first error that must end the process."""

    def add(self, event: str, error: BaseException, *, fatal: bool, **where: object) -> None:
        """Log `error` unless its cause was logged before.

        `fatal`: the process must end. `where`: further fields of the log line.
        """
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
