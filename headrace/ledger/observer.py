"""Detect expired incarnations from readings of their heartbeat counters.

An incarnation expires when its counter has not moved over at least three successful readings that span one
lease on the observer's own clock. A failed reading (`reset`) or a new observer starts over, so neither a
server outage nor an observer restart expires anyone. A reported incarnation is forgotten: it is reported
again only after another full lease of silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MIN_READINGS = 3


@dataclass
class _Standing:
    counter: int
    since: float
    readings: int


class BeatObserver:
    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._seen: dict[str, _Standing] = {}

    def observe(self, beats: dict[str, int]) -> list[str]:
        """Take one successful reading, name -> counter, and return the names that have expired."""
        now = self._clock()
        self._seen = {name: standing for name, standing in self._seen.items() if name in beats}
        expired = []
        for name, counter in sorted(beats.items()):
            standing = self._seen.get(name)
            if standing is None or standing.counter != counter:
                self._seen[name] = _Standing(counter, now, 1)
                continue
            standing.readings += 1
            if standing.readings >= MIN_READINGS and now - standing.since >= self._lease_s:
                expired.append(name)
                del self._seen[name]
        return expired

    def reset(self) -> None:
        """Discard all readings so far: one has failed."""
        self._seen.clear()
