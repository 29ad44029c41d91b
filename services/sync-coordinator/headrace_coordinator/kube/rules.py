"""Pure functions that decide deletion costs and which Events to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LARGEST_COST = 2**31 - 1
_STEP = 1.25
"""Costs are rounded to powers of this, so that they change only when it matters."""


def deletion_cost(tokens: int) -> int:
    """A pod's tokens in flight, rounded coarsely. 0 for none.

    The rounding hides small changes but keeps the order of pods that differ much.
    """
    if tokens <= 0:
        return 0
    rounded = 1.0
    while rounded * _STEP <= tokens:
        rounded *= _STEP
    return min(LARGEST_COST, max(1, round(rounded)))


def costs_to_set(
    there: Mapping[str, int | None],
    tokens: Mapping[str, int],
    set_at: Mapping[str, float],
    now: float,
    interval_s: float,
) -> dict[str, int]:
    """The patches that are due. `there`: cost of each pod as the cluster has it, None for none.

    One pod is patched at most once per `interval_s`, and not for a change of less than two steps, except to
    and from 0: an idle pod is the one to take.
    """
    out = {}
    for pod, old in there.items():
        new = deletion_cost(tokens.get(pod, 0))
        if new == (old or 0) or now - set_at.get(pod, float("-inf")) < interval_s:
            continue
        if old and new and max(old, new) < min(old, new) * _STEP * 1.2:
            continue
        out[pod] = new
    return out


@dataclass
class EventSeries:
    name: str
    count: int
    first_at: float
    written_at: float
    written: int = 1


@dataclass
class Aggregator:
    """Merges repeated Events. Repeats within `window_s` share one object with a count, which is updated at
    most once per `interval_s`. At most `most` objects are created per window."""

    window_s: float = 600.0
    interval_s: float = 30.0
    most: int = 25
    _series: dict[tuple[str, str], EventSeries] = field(default_factory=dict)

    def seen(self, reason: str, about: str, name: str, now: float) -> EventSeries | None:
        """Count one occurrence and return the series to write now, or None.

        The series is new (`count` 1), or one whose count must be updated.
        """
        self._series = {k: s for k, s in self._series.items() if now - s.first_at < self.window_s}
        series = self._series.get((reason, about))
        if series is None:
            if len(self._series) >= self.most:
                return None
            series = self._series[reason, about] = EventSeries(name, 1, now, now)
            return series
        series.count += 1
        return self._due(series, now)

    def forget(self, series: EventSeries) -> None:
        """Drop a series whose object could not be written. The next occurrence starts a new one."""
        self._series = {k: s for k, s in self._series.items() if s is not series}

    def overdue(self, now: float) -> Iterable[EventSeries]:
        """Series whose count has grown since they were last written."""
        return [s for s in list(self._series.values()) if self._due(s, now)]

    def _due(self, series: EventSeries, now: float) -> EventSeries | None:
        if series.count > series.written and now - series.written_at >= self.interval_s:
            series.written, series.written_at = series.count, now
            return series
        return None
