"""Prometheus metrics of the coordinator."""

from __future__ import annotations

import math

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from headrace.config import RunConfig
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.connections import Connections

disable_created_metrics()  # half of all series, which nobody reads

POLICY_VERSION = Gauge("headrace_policy_version", "Committed policy version; -1 before the first commit")
SYNC_PHASE = Histogram(
    "headrace_sync_phase_duration_seconds",
    "Seconds of a sync round by phase",
    ["phase"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
SYNC_BYTES = Counter("headrace_sync_bytes_total", "Bytes of weights sent in committed sync rounds")
SYNC_FAILURES = Counter(
    "headrace_sync_failures_total",
    "Failures of syncs: attempts that were repeated, members that were expired in one, rounds abandoned",
    ["reason"],
)
SYNC_GROUP_SIZE = Gauge("headrace_sync_group_size", "Members of the last committed round")
SYNC_LOGPROB_DIFF = Gauge(
    "headrace_sync_logprob_diff",
    "Largest log-prob difference of engine and trainer that a member has reported for the newest version",
)
RECOMMENDED_ROLLOUTERS = Gauge(
    "headrace_recommended_rollouters",
    "Rollouters that both idle ratios advise; before the first advice those of the start",
)
DRAINS = Counter(
    "headrace_rollouter_drains_total",
    "Rollouters whose pod was deleted: in_order (it left by itself) or gone (its work was taken back)",
    ["reason"],
)
LEAVING = Gauge("headrace_rollouters_leaving", "Rollouters whose pod was told to go and is still there")
CLUSTER_FAILURES = Counter(
    "headrace_kubernetes_failures_total", "Calls of the Kubernetes API that failed", ["operation"]
)
CANARY_TOLERANCE = Gauge(
    "headrace_sync_canary_tolerance", "Log-prob difference above which an engine is refused"
)
CONNECTED = Gauge("headrace_coordinator_rollouters_connected", "Rollouters with an open stream")
TAKING_PART = Gauge("headrace_coordinator_rollouters_taking_part", "Rollouters that take and finish work")
TRAINER = Gauge("headrace_coordinator_trainer_connected", "1 while the trainer's stream is open")

PHASES = ("pause", "transfer", "commit", "total")
REASONS = ("attempt", "member", "abandoned")
# From the start at 0: the first of a kind would not show as an increase.
for _phase in PHASES:
    SYNC_PHASE.labels(phase=_phase)
for _end in ("in_order", "gone"):
    DRAINS.labels(reason=_end)
for _reason in REASONS:
    SYNC_FAILURES.labels(reason=_reason)


class Canary:
    """The largest difference that a member has reported for the newest version."""

    def __init__(self) -> None:
        self._version = -1
        self._largest = 0.0

    def reported(self, version: int, difference: float) -> None:
        """NaN, which compares with nothing, counts as infinite."""
        shown = math.inf if math.isnan(difference) else difference
        self._largest = max(shown, self._largest) if version == self._version else shown
        self._version = version
        SYNC_LOGPROB_DIFF.set(self._largest)


CANARY = Canary()


def follow(config: RunConfig, connections: Connections) -> None:
    """Show `connections` as they are at each scrape."""
    CANARY_TOLERANCE.set(config.canary_limit)
    CONNECTED.set_function(lambda: len(connections.members))
    TAKING_PART.set_function(lambda: len(connections.taking_part))
    TRAINER.set_function(lambda: connections.trainer is not None)


def observe_round(c: pb.Committed, nbytes: int) -> None:
    POLICY_VERSION.set(c.version)
    for phase, seconds in zip(PHASES, (c.pause_s, c.transfer_s, c.commit_s, c.total_s), strict=True):
        SYNC_PHASE.labels(phase=phase).observe(seconds)
    SYNC_FAILURES.labels(reason="attempt").inc(max(0, c.attempts - 1))
    SYNC_BYTES.inc(nbytes)
    SYNC_GROUP_SIZE.set(c.members)
