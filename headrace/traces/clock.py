"""One clock for a timeline of several nodes: that of the Redis server, which every process can ask.

A node's wall clock may be off by milliseconds or minutes. Each process measures how far its own is from the
server's, when it begins and now and then, and writes that into its events; nothing is moved before they are
read. Times between two measurements are interpolated, so that order and nesting stay what they were.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

EVERY_S = 30.0
"""Clocks that drift apart by 50 ppm, which is much, are 1.5 ms apart by then."""
_ASKED = 5


class HasTime(Protocol):
    """A Redis client."""

    def time(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """At `ts` of a process' own clock the server's was `ahead` of it, give or take `within`; nanoseconds."""

    ts: int
    ahead: int
    within: int


def ask(client: HasTime, offset_ns: int) -> Reading:
    """The server's time against this process' clock, which is `offset_ns` plus the monotonic one.

    Of a few questions the one that was answered soonest counts: the server read its clock at some time
    between question and answer. Raises redis.RedisError.
    """
    found = []
    for _ in range(_ASKED):
        before = time.monotonic_ns()
        seconds, microseconds = client.time()
        after = time.monotonic_ns()
        half = (after - before) // 2
        middle = before + half + offset_ns
        found.append(Reading(middle, int(seconds) * 10**9 + int(microseconds) * 1000 - middle, half))
    return min(found, key=lambda r: r.within)


def aligned(ts: int, readings: Sequence[Reading]) -> int:
    """`ts` on the server's clock. `readings` are in order of time; with none it is as it was."""
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
