"""Prometheus metrics of the trainer. Only rank 0 shows them; what they tell is summed over all ranks."""

from __future__ import annotations

from headrace.metrics import row_keys
from headrace.metrics.row_entry import GAUGE_SUFFIX
from headrace.metrics.series import Service
from headrace.metrics.views import Graph

SERVICE = Service("trainer")

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

HEARTBEAT = SERVICE.gauge(
    "headrace_trainer_heartbeat_age_seconds",
    "Seconds since the last progress of this node's most stalled process, launcher or rank",
    unread="the liveness probe acts on it",
)
IDLE = SERVICE.late_gauge(
    "headrace_trainer_idle_ratio",
    "Share of the last step spent waiting for samples",
    unread="counters give the same over any time range",
)
WAIT_SECONDS = SERVICE.family(
    "counter",
    "headrace_trainer_wait_seconds_total",
    "Total seconds that the trainer has waited for samples",
)
STEP_SECONDS = SERVICE.family(
    "counter",
    "headrace_trainer_step_seconds_total",
    "Total seconds of local updates, waiting included",
)
PHASE = SERVICE.histogram(
    "headrace_trainer_phase_duration_seconds",
    "Duration of a local update by phase, in seconds",
    {"phase": ()},
    buckets=(0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
SAMPLES = SERVICE.counter(
    "headrace_samples_trained_total",
    "Samples trained by this process",
    graph=Graph("Overview", "Samples trained per second"),
)
TRAJECTORIES = SERVICE.counter(
    "headrace_trajectories_trained_total",
    "Trajectories trained by this process",
    unread="samples are shown",
)
TOKENS = SERVICE.counter("headrace_tokens_trained_total", "Response tokens trained by this process")
UPDATES = SERVICE.counter("headrace_local_updates_total", "Local updates done by this process")
SKIPPED = SERVICE.counter(
    "headrace_actor_skipped_steps_total",
    "Optimizer steps skipped because something was not finite",
)
STALE_SAMPLES = SERVICE.counter(
    "headrace_stale_samples_trained_total", "Trained samples with a version gap above 0"
)
STALE_TRAJECTORIES = SERVICE.counter(
    "headrace_stale_trajectories_trained_total",
    "Trained trajectories with a version gap above 0",
    unread="samples are shown",
)
VERSION_GAP = SERVICE.histogram(
    "headrace_version_gap_versions", "Version gap of trained samples", buckets=_VERSIONS
)
LARGEST_GAP = SERVICE.family(
    "gauge", "headrace_version_gap_largest_versions", "Largest version gap of the last local update"
)
GAP_BOUND = SERVICE.family(
    "gauge",
    "headrace_version_gap_bound_versions",
    "Largest version gap allowed in the last local update; +Inf if unbounded",
)
UPDATE_GAP = SERVICE.histogram(
    "headrace_update_gap_steps",
    "Optimizer steps between the weights that sampled and the update",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128),
    graph=Graph(
        "Staleness",
        "Update gap",
        "none",
        about="Optimizer steps between the weights that sampled and the update.",
    ),
)
PARTIAL = SERVICE.counter(
    "headrace_partial_samples_trained_total", "Trained samples with tokens of several versions"
)
SPAN = SERVICE.histogram(
    "headrace_partial_span_versions", "Newest minus oldest version in a trained sample", buckets=_VERSIONS
)
LATENCY = SERVICE.histogram(
    "headrace_queue_message_latency_seconds",
    "Seconds from a sample's finish until the trainer reads it",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
)
REWARD = SERVICE.histogram(
    "headrace_reward",
    "Reward of trained trajectories",
    buckets=(-10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10),
)
RESPONSE_TOKENS = SERVICE.histogram(
    "headrace_trained_response_length_tokens", "Tokens of trained responses", buckets=_TOKENS
)
LENGTH_ORDER = SERVICE.late_gauge(
    "headrace_length_order_correlation",
    "Rank correlation of a sample's tokens with its training order, in the last local update",
    graph=Graph(
        "Staleness",
        "Length and order of training",
        legend="rank correlation",
        about="Far above 0: long answers are always trained late, so they are the stale ones.",
    ),
)

GAUGES = {
    entry.name: SERVICE.late_gauge(
        entry.gauge_name, entry.gauge + GAUGE_SUFFIX, graph=entry.graph, unread=entry.unread
    )
    for entry in row_keys.TABLE.entries.values()
    if entry.gauge
}
"""By key of `metrics.jsonl`: the newest value of each that is to be shown."""
