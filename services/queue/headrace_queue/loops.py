"""The service's loops: each repeats one small step until it is stopped.

Guarantees:

- An outage (Redis down, disk full) does not end a loop. It is logged once at its start and once at its end.
  The loop is notified through `interrupted` and retries every second.
- A login refused by Redis, because its password was changed, is not an outage and ends the service.
- Any other exception from a step ends the service, and the supervisor restarts it.
- A hanging loop shows as a growing age in its `Pulse`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

import redis

from headrace.ledger.client import LedgerError, LedgerUnavailable, LedgerWentBack, LoginRefused, passes
from headrace.system.endings import EX_BEYOND_REPAIR, EX_CONFIG

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds between two tries during an outage."""

_OUTAGE_ERRORS = (
    LedgerUnavailable,
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    OSError,
)


class Fatal(Exception):
    """The service cannot continue, and a restart would not help. `code` is its exit status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Loop(Protocol):
    """One duty of the service."""

    name: str

    async def step(self) -> float:
        """Do what is due; return the seconds until the next step."""

    def interrupted(self) -> None:
        """Called when an outage cut a step short: state kept between steps may be stale."""


@dataclass
class Pulse:
    """The recent activity of a loop. Times are seconds on the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    stepped: float | None = None
    """End of the last step, completed or cut short by an outage."""
    outage_since: float | None = None
    errors: int = 0

    @property
    def age_s(self) -> float:
        """Seconds since the end of the last step."""
        return time.monotonic() - (self.started if self.stepped is None else self.stepped)


def is_outage(error: BaseException) -> bool:
    """Whether `error` comes from outside the service and may be temporary."""
    if type(error) is LedgerError and error.__context__ is not None:
        error = error.__context__  # the server's error
    if isinstance(error, redis.ResponseError) and passes(error):
        return True
    return isinstance(error, _OUTAGE_ERRORS)


async def run_loop(loop: Loop, pulse: Pulse, stop: asyncio.Event) -> None:
    """Step until `stop` is set. Raises what a step raises, outages excepted."""
    while not stop.is_set():
        try:
            pause_s = await loop.step()
        except Exception as error:  # outages have many types; everything else is re-raised
            if isinstance(error, LedgerWentBack):
                raise Fatal(str(error), EX_BEYOND_REPAIR) from None
            if isinstance(error, LoginRefused):
                raise Fatal(str(error), EX_CONFIG) from None
            if not is_outage(error):
                raise
            loop.interrupted()
            pause_s = _note_outage(loop.name, pulse, error)
        else:
            _note_success(loop.name, pulse)
        pulse.stepped = time.monotonic()
        await _wait(stop, pause_s)


def _note_outage(name: str, pulse: Pulse, error: Exception) -> float:
    pulse.errors += 1
    if pulse.outage_since is None:
        pulse.outage_since = time.monotonic()
        log.warning("loop interrupted, trying again", extra={"loop": name, "error": str(error)})
    return RETRY_S


def _note_success(name: str, pulse: Pulse) -> None:
    if pulse.outage_since is not None:
        away_s = round(time.monotonic() - pulse.outage_since, 3)
        log.info("loop goes on", extra={"loop": name, "away_s": away_s})
        pulse.outage_since = None


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Return after `seconds`, or at once when `stop` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass
