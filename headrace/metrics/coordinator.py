"""Prometheus metrics of the coordinator."""

from __future__ import annotations

from headrace.metrics.series import Service

SERVICE = Service("coordinator")

PHASES = ("pause", "transfer", "commit", "total")

POLICY_VERSION = SERVICE.gauge(
    "headrace_policy_version", "Committed policy version; -1 before the first commit"
)
SYNC_PHASE = SERVICE.histogram(
    "headrace_sync_phase_duration_seconds",
    "Duration of a sync round by phase, in seconds",
    {"phase": PHASES},
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
SYNC_BYTES = SERVICE.counter("headrace_sync_bytes_total", "Bytes of weights sent in committed sync rounds")
SYNC_FAILURES = SERVICE.counter(
    "headrace_sync_failures_total",
    "Sync failures: attempts repeated, members expired, rounds abandoned",
    {"reason": ("attempt", "member", "abandoned")},
)
SYNC_GROUP_SIZE = SERVICE.gauge("headrace_sync_group_size", "Members of the last committed round")
SYNC_LOGPROB_DIFF = SERVICE.gauge(
    "headrace_sync_logprob_diff",
    "Largest log-prob difference between engine and trainer reported for the newest version",
)
RECOMMENDED_ROLLOUTERS = SERVICE.gauge(
    "headrace_recommended_rollouters",
    "Recommended rollouters, from both idle ratios; the initial number before the first recommendation",
)
DRAINS = SERVICE.counter(
    "headrace_rollouter_drains_total",
    "Rollouters whose pod was deleted: in_order (it left by itself) or gone (its work was taken back)",
    {"reason": ("in_order", "gone")},
    unread="in a cluster only, for diagnosis",
)
LEAVING = SERVICE.gauge(
    "headrace_rollouters_leaving", "Rollouters whose pod was told to terminate and is still there"
)
CLUSTER_FAILURES = SERVICE.counter(
    "headrace_kubernetes_failures_total",
    "Failed calls to the Kubernetes API",
    {"operation": ()},
    unread="in a cluster only, for diagnosis",
)
CANARY_TOLERANCE = SERVICE.gauge(
    "headrace_sync_canary_tolerance", "Log-prob difference above which an engine is refused"
)
CONNECTED = SERVICE.gauge("headrace_coordinator_rollouters_connected", "Rollouters with an open stream")
TAKING_PART = SERVICE.gauge(
    "headrace_coordinator_rollouters_taking_part", "Rollouters that take and finish work"
)
TRAINER = SERVICE.gauge("headrace_coordinator_trainer_connected", "1 while the trainer's stream is open")
