"""Where the time of a step goes: every nanosecond belongs to exactly one phase.

So the phases of a row add up to its step by construction, and the steps to the total time. Time between
phases has a phase of its own, `other`; between two updates it is `gen_wait`, the wait for samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

GEN_WAIT, OTHER = "gen_wait", "other"


def seconds(ns: int) -> float:
    """Nanoseconds as seconds. Rounding gives the exact nanoseconds back, up to 100 days."""
    return ns / 1e9


class StepClock:
    """Clock of a step's phases; it starts in the wait for samples. Times are integer nanoseconds of `now`."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._now = now
        self._open = [GEN_WAIT]
        """The open phases, the innermost last. The first is the time between phases."""
        self._spent: dict[str, int] = {}
        self._at = self.row_began = now()

    def _count(self) -> int:
        """Add the time until now to the innermost phase. Returns the present time."""
        now = self._now()
        phase = self._open[-1]
        self._spent[phase] = self._spent.get(phase, 0) + now - self._at
        self._at = now
        return now

    def enter(self, name: str) -> int:
        """Begin a phase. A nested phase pauses the outer one's clock. Returns the time."""
        now = self._count()
        self._open.append(name)
        return now

    def leave(self) -> int:
        """End the innermost phase. Returns the time."""
        now = self._count()
        self._open.pop()
        return now

    def begin_wait(self) -> int:
        """Count time between phases as the wait for samples from now on. Returns the time."""
        now = self._count()
        self._open[0] = GEN_WAIT
        return now

    def end_wait(self) -> int:
        """End the wait: the samples have arrived. Returns the time."""
        now = self._count()
        self._open[0] = OTHER
        return now

    def move(self, source: str, target: str, ns: int) -> int:
        """Move up to `ns` of the time counted for `source` to `target`. Returns how much was moved."""
        self._count()
        moved = max(0, min(ns, self._spent.get(source, 0)))
        self._spent[source] = self._spent.get(source, 0) - moved
        self._spent[target] = self._spent.get(target, 0) + moved
        return moved

    def row(self) -> tuple[int, int, Mapping[str, int]]:
        """End the row. Returns its begin and end, and the time of each phase; the phases add up to the
        difference. Open phases continue in the next row."""
        began, ended = self.row_began, self._count()
        spent, self._spent, self.row_began = self._spent, {}, ended
        return began, ended, spent
