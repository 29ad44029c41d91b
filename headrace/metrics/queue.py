"""Prometheus metrics of the queue service.

Most are counts of the ledger, from one atomic reading at each scrape. Their entries say how they are read
from it, so that such a metric needs no other line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from headrace.ledger.replies import Stats
from headrace.metrics.series import Family, Service
from headrace.metrics.views import Graph

SERVICE = Service("queue")

FENCED = (
    *("adopt", "claim", "commit", "complete", "drop", "fail", "finish", "hand_back", "hold", "park"),
    *("reject", "train"),
)
REQUEUED = ("expired", "failed", "handback", "lineage", "operator", "rejected", "rollback")
KEPT = ("parked", "queued", "training")
DIED = (
    *("environment_error", "generation_error", "malformed", "non_finite", "poison"),
    *("reward_error", "timeout"),
)
DROPPED = ("drop_last", "zero_spread")
"""What the ledger counts by."""

# -- the process ------------------------------------------------------------------------------------------

REDIS_UP = SERVICE.family("gauge", "headrace_queue_redis_up", "1 when Redis answered this scrape")
LOOP_AGE = SERVICE.family(
    "gauge",
    "headrace_queue_loop_age_seconds",
    "Time since a loop's last iteration",
    {"loop": ()},
    graph=Graph("Queue", "Age of the queue service's loops", "s"),
)
LOOP_ERRORS = SERVICE.family(
    "counter",
    "headrace_queue_loop_errors_total",
    "Loop iterations cut short by an outage, since the start",
    {"loop": ()},
    unread="the loops' age is shown",
)
EXPIRED_OWNERS = SERVICE.family(
    "counter",
    "headrace_queue_expired_owners_total",
    "Owners that this process has expired",
    unread="requeued samples are shown, by reason",
)
VALIDATION_SCORE = SERVICE.family(
    "gauge",
    "headrace_validation_score",
    "Newest validation score of a data source",
    {"data_source": (), "statistic": ()},
    graph=Graph("Overview", "Validation"),
)
VALIDATION_UNFINISHED = SERVICE.family(
    "gauge",
    "headrace_validation_unfinished",
    "Held-out prompts without a result in the newest validation",
    {"data_source": ()},
    unread="a state, of interest at one moment",
)
REDIS_USED = SERVICE.family("gauge", "headrace_redis_used_memory_bytes", "Memory that the Redis server uses")
REDIS_MAX = SERVICE.family(
    "gauge", "headrace_redis_max_memory_bytes", "Memory that the Redis server may use; 0 for no limit"
)
REDIS_NEEDED = SERVICE.family(
    "gauge",
    "headrace_redis_needed_memory_bytes",
    "Most memory that this run can use on the Redis server",
)

# -- the ledger -------------------------------------------------------------------------------------------

_READINGS: list[tuple[Family, Callable[[Stats], float]]] = []
_COUNTS: list[tuple[Family, Callable[[Stats], Mapping[str, int]]]] = []


def gauge(
    name: str, text: str, read: Callable[[Stats], float], *, graph: Graph | None = None, unread: str = ""
) -> Family:
    """A gauge that is read from the ledger; `name`: what follows `headrace_queue_`."""
    family = SERVICE.family("gauge", f"headrace_queue_{name}", text, graph=graph, unread=unread)
    _READINGS.append((family, read))
    return family


def counter(
    name: str, text: str, read: Callable[[Stats], float], *, graph: Graph | None = None, unread: str = ""
) -> Family:
    """A counter that is read from the ledger."""
    family = SERVICE.family("counter", name, text, graph=graph, unread=unread)
    _READINGS.append((family, read))
    return family


def counter_by(
    label: str,
    known: Sequence[str],
    name: str,
    text: str,
    read: Callable[[Stats], Mapping[str, int]],
    *,
    graph: Graph | None = None,
    unread: str = "",
) -> Family:
    """The same by a label, whose `known` values are shown from the start."""
    family = SERVICE.family("counter", name, text, {label: known}, graph=graph, unread=unread)
    _COUNTS.append((family, read))
    return family


DEPTH = gauge("depth", "Finished samples waiting for the trainer", lambda s: s.counts["queued"])
READY = gauge("ready", "Prompts waiting for a rollouter", lambda s: s.counts["ready"])
IN_FLIGHT = gauge("in_flight", "Samples that a rollouter is working on", lambda s: s.counts["in_flight"])
PARKED = gauge(
    "parked", "Samples whose partial work is waiting for a rollouter", lambda s: s.counts["parked"]
)
TRAINING = gauge(
    "training", "Samples claimed by the trainer and not yet trained", lambda s: s.counts["training"]
)
TRAINED = gauge("trained", "Samples trained", lambda s: s.counts["trained"])
DEAD = gauge("dead", "Samples in the dead letters", lambda s: s.counts["dead"])
DROPPED_NOW = gauge(
    "dropped", "Samples dropped", lambda s: s.counts["dropped"], unread="they are shown by reason"
)
OLDEST_AGE = gauge("oldest_age_seconds", "Age of the oldest finished sample", lambda s: s.oldest_queued_age_s)
MAX_REQUIRED = gauge("max_required", "Gate: most samples outstanding or trained", lambda s: s.max_required)
TRAINED_SINCE_SYNC = gauge(
    "trained_since_sync", "Samples trained since the last sync", lambda s: s.trained_since_sync
)
HELD = gauge(
    "held",
    "1 while takes are held back by a sync round",
    lambda s: s.held,
    unread="a state, of interest at one moment",
)
END_OF_DATA = gauge(
    "end_of_data",
    "1 once the run's last prompt has been issued",
    lambda s: s.end_of_data,
    unread="a state, of interest at one moment",
)
FINAL = gauge("final", "1 once the run's last commit has been made", lambda s: s.final)
MEMBERS = gauge("members", "Rollouters that may take and finish work", lambda s: len(s.members))
ISSUED = counter("headrace_queue_issued_total", "Prompts issued", lambda s: s.issued_total)
RESTARTED = counter(
    "headrace_queue_restarted_total",
    "Samples restarted because max_version_gap discarded their partial work",
    lambda s: s.restarted,
)
FENCED_BY = counter_by(
    "operation",
    FENCED,
    "headrace_queue_fenced_total",
    "Late requests refused, by operation",
    lambda s: s.fenced_by,
)
REQUEUED_BY = counter_by(
    "reason",
    REQUEUED,
    "headrace_queue_requeued_total",
    "Samples put back, by reason",
    lambda s: s.requeued,
)
KEPT_BY = counter_by(
    "state",
    KEPT,
    "headrace_queue_kept_total",
    "Work that a new trainer kept, by its state",
    lambda s: s.kept,
)
DEAD_LETTERS = counter_by(
    "reason",
    DIED,
    "headrace_queue_dead_letters_total",
    "Samples that died, by reason",
    lambda s: s.died,
)
SAMPLES_DROPPED = counter_by(
    "reason",
    DROPPED,
    "headrace_samples_dropped_total",
    "Samples dropped, by reason",
    lambda s: s.left,
)


def of_ledger(stats: Stats) -> Iterator[Metric]:
    """Everything that is read from the ledger."""
    for family, read in _READINGS:
        yield family.value(read(stats))
    for family, counts in _COUNTS:
        yield family.counts(counts(stats))
