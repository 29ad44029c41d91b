"""Recommend a number of rollouters from both idle ratios: a pure function with hysteresis.

Rollouters are producers. Let n be their number, R the share of time in which their engines were idle, and T
the share in which the trainer waited for samples. One second then has n·(1 − R) seconds of generation and
1 − T seconds of training. A trainer that never waits needs the same generation in 1 − T seconds:

    n* = n · (1 − R) / (1 − T)

If only the trainer is idle, the run needs more rollouters; if only the rollouters are idle, fewer. If both
are idle, the sync or the reward holds both up: n* is near n and no change is advised. (The length of the
sample queue is no substitute: it grows when there are too many producers.)

Guarantees: the advice stays within its limits. It changes only when `windows` consecutive windows ask for the
same direction. Upward it at most doubles. Downward it takes one step per `down_interval_s`, because a
rollouter that leaves costs work, while one that joins costs only its startup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.config.kubernetes import RecommendationConfig

_LEAST_BUSY = 0.02
"""Lower bound on busy shares, to keep the division safe."""


@dataclass(frozen=True)
class WindowReading:
    """The measurements of one sync window."""

    trainer_idle: float
    """0 to 1: seconds spent waiting for samples over seconds of the updates."""
    rollouter_idle: float
    """0 to 1: share of time in which the engines had no running request."""
    rollouters: int
    """Number of rollouters that took part."""


@dataclass(frozen=True)
class Advice:
    """The newest recommendation, and the state needed for the next one."""

    rollouters: int
    why: str
    readings: tuple[WindowReading, ...]
    """The last windows with this number of rollouters, newest last."""
    lowered_at: float = -math.inf
    """Time of the last step down, in seconds on the caller's clock."""


def wanted(reading: WindowReading) -> float:
    """n*: the number of rollouters at which neither they nor the trainer would be idle."""
    if reading.rollouters == 0:
        return 1.0
    generation = max(_LEAST_BUSY, 1.0 - reading.rollouter_idle)
    training = max(_LEAST_BUSY, 1.0 - reading.trainer_idle)
    return reading.rollouters * generation / training


def direction(c: RecommendationConfig, reading: WindowReading) -> int:
    """What this window alone asks for: 1 for more rollouters, -1 for fewer, 0 for no change."""
    there, best = reading.rollouters, wanted(reading)
    margin = c.tolerance * there
    if best > there + margin:
        return 1
    return -1 if best < there - margin and best <= there - 1 else 0


def advise(c: RecommendationConfig, last: Advice | None, reading: WindowReading, now: float) -> Advice:
    """The recommendation after one more window. `now`: seconds, on any clock that only goes forward."""
    there = reading.rollouters
    before = last.rollouters if last else there
    lowered_at = last.lowered_at if last else -math.inf
    if there == 0:
        return Advice(_within(c, max(1, before)), "nobody generates", (reading,), lowered_at)
    # Measurements with another number of rollouters say little about this one.
    same = [r for r in last.readings if r.rollouters == there] if last else []
    readings = (*same, reading)[-c.windows :]
    asked = {direction(c, r) for r in readings}
    if len(readings) < c.windows or len(asked) > 1:
        return Advice(_within(c, before), "waiting for windows that agree", readings, lowered_at)
    if asked == {1}:
        best = min(wanted(r) for r in readings)
        target = min(math.ceil(best - c.tolerance * there), 2 * there)
        return Advice(_within(c, target), "the trainer waits for samples", readings, lowered_at)
    if asked == {-1}:
        if before < there:  # already advised, not yet carried out
            return Advice(_within(c, before), "rollouters are idle", readings, lowered_at)
        if now - lowered_at >= c.down_interval_s:
            return Advice(_within(c, there - 1), "rollouters are idle", readings, now)
        return Advice(
            _within(c, there), "rollouters are idle; the next step down comes later", readings, lowered_at
        )
    both = min(reading.trainer_idle, reading.rollouter_idle) > c.tolerance
    why = "both wait: look at the sync and the reward" if both else "balanced"
    return Advice(_within(c, there), why, readings, lowered_at)


def _within(c: RecommendationConfig, rollouters: int) -> int:
    return max(c.min_rollouters, min(c.max_rollouters, rollouters))


def recommendation_key(run: str) -> str:
    """Redis key of the newest advice. No other service depends on it."""
    return f"headrace:{{{run}}}:recommendation"


def encode(advice: Advice) -> str:
    return json.dumps(
        {"rollouters": advice.rollouters, "why": advice.why, "window": asdict(advice.readings[-1])}
    )


def decode(raw: bytes | str | None) -> Mapping[str, Any] | None:
    """Parse what `encode` wrote, perhaps in another release; None for a missing or malformed value.

    The result has `rollouters`, an int, and `why`, a text.
    """
    try:
        found = json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("rollouters")) is not int:
        return None
    return {**found, "why": str(found.get("why", "not told"))}
