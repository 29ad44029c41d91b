"""A common clock for a timeline of several nodes: the Redis server's, which every process can query.

A node's wall clock may be off by milliseconds or minutes. Each process measures its offset from the server's
clock at startup and at intervals, and records it with its events. Times are corrected only when the events
are read. Offsets between two measurements are interpolated, which preserves order and nesting.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

EVERY_S = 30.0
"""Interval of measurements. Clocks that drift apart by 50 ppm, which is a lot, diverge 1.5 ms in it."""
_ASKED = 5


class HasTime(Protocol):
    """Something with Redis's TIME command: a Redis client."""

    def time(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ClockReading:
    """At `ts` on the process's own clock, the server's was ahead by `ahead` ± `within`. In nanoseconds."""

    ts: int
    ahead: int
    within: int


def ask(client: HasTime, offset_ns: int) -> ClockReading:
    """Compare the server's clock with this process's, which is `offset_ns` plus the monotonic clock.

    The server reads its clock at some time between request and reply, so of a few requests the fastest is
    used. Raises redis.RedisError.
    """
    found = []
    for _ in range(_ASKED):
        before = time.monotonic_ns()
        seconds, microseconds = client.time()
        after = time.monotonic_ns()
        half = (after - before) // 2
        middle = before + half + offset_ns
        found.append(ClockReading(middle, int(seconds) * 10**9 + int(microseconds) * 1000 - middle, half))
    return min(found, key=lambda r: r.within)


def aligned(ts: int, readings: Sequence[ClockReading]) -> int:
    """Convert `ts` to the server's clock. `readings` are in order of time; without any, `ts` is unchanged."""
    if not readings:
        return ts
    later = bisect_right(readings, ts, key=lambda r: r.ts)
    if later == 0:
        return ts + readings[0].ahead
    before = readings[later - 1]
    if later == len(readings):
        return ts + before.ahead
    after = readings[later]
    return ts + before.ahead + (after.ahead - before.ahead) * (ts - before.ts) // (after.ts - before.ts)
