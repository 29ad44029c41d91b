"""The service's metrics, computed from one atomic reading of the ledger at each scrape.

Counts come from the ledger, not from this process, so they survive restarts. While Redis is down only
`headrace_queue_redis_up` (0) and the loops' own numbers are exposed, and no stale counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.ledger.replies import Stats
from headrace.metrics import queue as table
from headrace.metrics.sync_and_eval import score_names
from headrace_queue.loops import Pulse
from headrace_queue.validation import Score


@dataclass(frozen=True)
class Memory:
    """Memory of the Redis server, in bytes."""

    used: int
    limit: int
    """`maxmemory`; 0 means no limit."""
    needed: int
    """The most that the run can use, from `headrace.config.redis_memory`."""


class QueueCollector(Collector):
    """Holds the newest reading. `stats` is None if Redis did not answer."""

    def __init__(self, pulses: Mapping[str, Pulse]) -> None:
        self._pulses = pulses
        self.stats: Stats | None = None
        self.memory: Memory | None = None
        self.scores: Sequence[Score] = ()
        self.expired_owners = 0

    def collect(self) -> Iterator[Metric]:
        yield table.REDIS_UP.value(self.stats is not None)
        yield table.LOOP_AGE.counts({name: pulse.age_s for name, pulse in self._pulses.items()})
        yield table.LOOP_ERRORS.counts({name: pulse.errors for name, pulse in self._pulses.items()})
        yield table.EXPIRED_OWNERS.value(self.expired_owners)
        yield table.VALIDATION_SCORE.by(
            ((row.data_source, name), value)
            for row in self.scores
            for key, name in score_names(row.k).items()
            if (value := getattr(row, key)) is not None
        )
        yield table.VALIDATION_UNFINISHED.by(((row.data_source,), row.unfinished) for row in self.scores)
        if self.stats is not None:
            yield from table.of_ledger(self.stats)
        if self.memory is not None:
            yield table.REDIS_USED.value(self.memory.used)
            yield table.REDIS_MAX.value(self.memory.limit)
            yield table.REDIS_NEEDED.value(self.memory.needed)


def registry(collector: QueueCollector) -> CollectorRegistry:
    """A separate registry: the process-wide one would include whatever libraries register."""
    out = CollectorRegistry()
    out.register(collector)
    return out
