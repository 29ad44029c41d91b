"""Prometheus metrics of the coordinator."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from headrace.v1 import sync_pb2 as pb

POLICY_VERSION = Gauge("headrace_policy_version", "Committed policy version; -1 before the first commit")
SYNC_PHASE = Histogram(
    "headrace_sync_phase_duration_seconds",
    "Seconds of a sync round by phase",
    ["phase"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
SYNC_BYTES = Counter("headrace_sync_bytes_total", "Bytes of weights sent in committed sync rounds")
SYNC_FAILURES = Counter("headrace_sync_failures_total", "Failures in sync rounds", ["reason"])
SYNC_GROUP_SIZE = Gauge("headrace_sync_group_size", "Members of the last committed round")
SYNC_LOGPROB_DIFF = Gauge(
    "headrace_sync_logprob_diff", "Largest log-prob difference of engine and trainer in the last canary"
)
RECOMMENDED_ROLLOUTERS = Gauge(
    "headrace_recommended_rollouters",
    "Rollouters that both idle ratios advise; before the first advice those of the start",
)
DRAINS = Counter(
    "headrace_rollouter_drains_total",
    "Rollouters whose pod was deleted: in_order (it left by itself) or gone (its work was taken back)",
    ["outcome"],
)
LEAVING = Gauge("headrace_rollouters_leaving", "Rollouters whose pod was told to go and is still there")
CLUSTER_FAILURES = Counter(
    "headrace_kubernetes_failures_total", "Calls of the Kubernetes API that failed", ["call"]
)


def observe_round(c: pb.Committed, nbytes: int) -> None:
    POLICY_VERSION.set(c.version)
    for phase, seconds in (
        ("pause", c.pause_s),
        ("transfer", c.transfer_s),
        ("commit", c.commit_s),
        ("total", c.total_s),
    ):
        SYNC_PHASE.labels(phase=phase).observe(seconds)
    SYNC_BYTES.inc(nbytes)
    SYNC_GROUP_SIZE.set(c.members)
