"""The service's loops: each does one small step again and again until told to stop.

What this module guarantees:

- An outage (Redis away, disk full) ends no loop: it is logged once, the loop is told through `interrupted`,
  tries again every second, and says when it is over.
- A login that Redis refuses, since its password was changed, is no outage and ends the service.
- Anything else that a step raises ends the service: the supervisor starts it anew.
- A loop that hangs shows as an age in `Pulse` that grows.
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
    """The service cannot go on, and starting it anew would not help. `code` is its exit status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Loop(Protocol):
    """One duty of the service."""

    name: str

    async def step(self) -> float:
        """Do what is due; return the seconds until the next step."""

    def interrupted(self) -> None:
        """A step was cut short by an outage: what it knew may be out of date."""


@dataclass
class Pulse:
    """What a loop has done lately. Times are seconds on the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    stepped: float | None = None
    """End of the last step, be it well or cut short by an outage."""
    outage_since: float | None = None
    errors: int = 0

    @property
    def age_s(self) -> float:
        """Seconds since the loop last came round."""
        return time.monotonic() - (self.started if self.stepped is None else self.stepped)


def is_outage(error: BaseException) -> bool:
    """Whether `error` is the world's fault and may pass."""
    if type(error) is LedgerError and error.__context__ is not None:
        error = error.__context__  # what the server said
    if isinstance(error, redis.ResponseError) and passes(error):
        return True
    return isinstance(error, _OUTAGE_ERRORS)


async def run_loop(loop: Loop, pulse: Pulse, stop: asyncio.Event) -> None:
    """Step until `stop` is set. Raises what a step raises, outages excepted."""
    while not stop.is_set():
        try:
            pause_s = await loop.step()
        except Exception as error:  # outages come as many kinds; everything else is raised on
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
