"""Where the time of a step goes: every nanosecond belongs to exactly one phase.

So the phases of a row add up to its step by construction, and the steps to the whole time. What happens
between the phases is one of its own, `other`; between two updates it is `gen_wait`, the wait for samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

GEN_WAIT, OTHER = "gen_wait", "other"


def seconds(ns: int) -> float:
    """Of a duration; nanoseconds come back exactly by rounding, up to 100 days."""
    return ns / 1e9


class StepClock:
    """Begins waiting. All times are integers, nanoseconds of `now`."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._now = now
        self._open = [GEN_WAIT]
        """The phases that are being measured, the innermost last; the first is what lies between them."""
        self._spent: dict[str, int] = {}
        self._at = self.row_began = now()

    def _count(self) -> int:
        """Give the time until now to the innermost phase. Returns the time."""
        now = self._now()
        phase = self._open[-1]
        self._spent[phase] = self._spent.get(phase, 0) + now - self._at
        self._at = now
        return now

    def enter(self, name: str) -> int:
        """A phase begins; one within another stops the outer one's clock. Returns the time."""
        now = self._count()
        self._open.append(name)
        return now

    def leave(self) -> int:
        """The innermost phase ends. Returns the time."""
        now = self._count()
        self._open.pop()
        return now

    def begin_wait(self) -> int:
        """From now on what lies between the phases is the wait for samples. Returns the time."""
        now = self._count()
        self._open[0] = GEN_WAIT
        return now

    def end_wait(self) -> int:
        """The samples are here. Returns the time."""
        now = self._count()
        self._open[0] = OTHER
        return now

    def move(self, source: str, target: str, ns: int) -> int:
        """Of the time that `source` has so far, `ns` or what there is was `target`'s. Returns how much."""
        self._count()
        moved = max(0, min(ns, self._spent.get(source, 0)))
        self._spent[source] = self._spent.get(source, 0) - moved
        self._spent[target] = self._spent.get(target, 0) + moved
        return moved

    def row(self) -> tuple[int, int, Mapping[str, int]]:
        """Ends the row: when it began and ended, and the time of each phase, which adds up to what lies
        between. Phases that are open go on in the next row."""
        began, ended = self.row_began, self._count()
        spent, self._spent, self.row_began = self._spent, {}, ended
        return began, ended, spent
