"""The service's metrics, computed from one atomic reading of the ledger at each scrape.

Counts come from the ledger, not from this process: they survive its restarts. While Redis is away only
`headrace_queue_redis_up` (0) and the loops' own numbers are shown, no stale ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.ledger.replies import Stats
from headrace.run_log_keys import score_names
from headrace_queue.loops import Pulse
from headrace_queue.validation import Score

FENCED = (
    *("adopt", "bury", "claim", "commit", "complete", "drop", "fail", "finish", "hand_back", "hold", "park"),
    *("reject", "release", "remove_member", "train"),
)
REQUEUED = ("expired", "failed", "handback", "lineage", "operator", "rejected", "rollback")
KEPT = ("parked", "queued", "training")
DIED = (
    *("environment_error", "generation_error", "malformed", "non_finite", "poison"),
    *("reward_error", "timeout"),
)
DROPPED = ("drop_last", "zero_spread")
"""What the ledger counts by. Shown from the start at 0: the first of a kind would not show as an increase."""


@dataclass(frozen=True)
class Memory:
    """Of the Redis server, bytes."""

    used: int
    limit: int
    """`maxmemory`; 0: none."""
    needed: int
    """What the run can take at most, by `headrace.memory`."""


class QueueCollector(Collector):
    """Holds the newest reading; `stats` None stands for a Redis that did not answer."""

    def __init__(self, pulses: Mapping[str, Pulse]) -> None:
        self._pulses = pulses
        self.stats: Stats | None = None
        self.memory: Memory | None = None
        self.scores: Sequence[Score] = ()
        self.expired_owners = 0

    @classmethod
    def described(cls) -> list[Metric]:
        """Every metric that a service can show, for the documentation."""
        collector = cls({})
        collector.stats = Stats.empty()
        collector.memory = Memory(0, 0, 0)
        return list(collector.collect())

    def collect(self) -> Iterator[Metric]:
        yield _gauge("redis_up", "1 when Redis answered this scrape", self.stats is not None)
        yield from self._loops()
        yield from self._validation()
        if self.stats is not None:
            yield from _ledger(self.stats)
        if self.memory is not None:
            yield from _memory(self.memory)

    def _loops(self) -> Iterator[Metric]:
        age = GaugeMetricFamily(
            "headrace_queue_loop_age_seconds", "Time since a loop last came round", labels=["loop"]
        )
        errors = CounterMetricFamily(
            "headrace_queue_loop_errors", "Steps that an outage cut short, since the start", labels=["loop"]
        )
        for name, pulse in self._pulses.items():
            age.add_metric([name], pulse.age_s)
            errors.add_metric([name], pulse.errors)
        yield from (age, errors)
        yield CounterMetricFamily(
            "headrace_queue_expired_owners", "Owners that this process has expired", value=self.expired_owners
        )

    def _validation(self) -> Iterator[Metric]:
        score = GaugeMetricFamily(
            "headrace_validation_score",
            "Newest validation score of a data source",
            labels=["data_source", "statistic"],
        )
        unfinished = GaugeMetricFamily(
            "headrace_validation_unfinished",
            "Held-out prompts without a result in the newest validation",
            labels=["data_source"],
        )
        for row in self.scores:
            for key, name in score_names(row.k).items():
                if (value := getattr(row, key)) is not None:
                    score.add_metric([row.data_source, name], value)
            unfinished.add_metric([row.data_source], row.unfinished)
        yield from (score, unfinished)


def registry(collector: QueueCollector) -> CollectorRegistry:
    """A registry of its own: the process-wide one would mix in whatever a library registers."""
    out = CollectorRegistry()
    out.register(collector)
    return out


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_queue_{name}", text, value=float(value))


def _by(label: str, name: str, text: str, counts: Mapping[str, int], known: Sequence[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted({**dict.fromkeys(known, 0), **counts}.items()):
        family.add_metric([value], count)
    return family


def _ledger(stats: Stats) -> Iterator[Metric]:
    counts = stats.counts
    yield _gauge("depth", "Finished samples that wait for the trainer", counts["queued"])
    yield _gauge("ready", "Prompts that wait for a rollouter", counts["ready"])
    yield _gauge("in_flight", "Samples that a rollouter works on", counts["in_flight"])
    yield _gauge("parked", "Samples whose partial work waits for a rollouter", counts["parked"])
    yield _gauge("training", "Samples claimed by the trainer and not yet trained", counts["training"])
    yield _gauge("trained", "Samples trained", counts["trained"])
    yield _gauge("dead", "Samples in the dead letters", counts["dead"])
    yield _gauge("dropped", "Samples dropped", counts["dropped"])
    yield _gauge("oldest_age_seconds", "Age of the oldest finished sample", stats.oldest_queued_age_s)
    yield _gauge("max_required", "Gate: most samples outstanding or trained", stats.max_required)
    yield _gauge("trained_since_sync", "Samples trained since the last sync", stats.trained_since_sync)
    yield _gauge("held", "1 while takes are held back by a sync round", stats.held)
    yield _gauge("end_of_data", "1 once the last prompt of the run is issued", stats.end_of_data)
    yield _gauge("final", "1 once the last commit of the run is made", stats.final)
    yield _gauge("members", "Rollouters that may take and finish work", len(stats.members))
    yield CounterMetricFamily("headrace_queue_issued", "Prompts issued", value=stats.issued_total)
    yield CounterMetricFamily(
        "headrace_queue_restarted",
        "Partial work thrown away by max_version_gap: its samples started again",
        value=stats.restarted,
    )
    yield _by(
        "operation", "headrace_queue_fenced", "Late requests refused, by operation", stats.fenced_by, FENCED
    )
    yield _by("reason", "headrace_queue_requeued", "Samples put back, by reason", stats.requeued, REQUEUED)
    yield _by("state", "headrace_queue_kept", "Work that a new trainer kept, by its state", stats.kept, KEPT)
    yield _by("reason", "headrace_queue_dead_letters", "Samples that died, by reason", stats.died, DIED)
    yield _by("reason", "headrace_samples_dropped", "Samples dropped, by reason", stats.left, DROPPED)


def _memory(memory: Memory) -> Iterator[Metric]:
    for name, text, value in (
        ("used", "Memory that the Redis server uses", memory.used),
        ("max", "Memory that the Redis server may use; 0 for no limit", memory.limit),
        ("needed", "Memory that this run can take of the Redis server at most", memory.needed),
    ):
        yield GaugeMetricFamily(f"headrace_redis_{name}_memory_bytes", text, value=float(value))
