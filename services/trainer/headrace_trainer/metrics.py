"""Prometheus metrics of the trainer (rank 0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

IDLE = Gauge("headrace_trainer_idle_ratio", "Seconds waiting for samples over seconds of the last step")
WAIT = Counter("headrace_trainer_wait_seconds_total", "Seconds in which the trainer waited for samples")
STEP = Counter("headrace_trainer_step_seconds_total", "Seconds of all local updates, waiting included")
PHASE = Histogram(
    "headrace_trainer_phase_duration_seconds",
    "Seconds of a local update by phase",
    ["phase"],
    buckets=(0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
SAMPLES = Counter("headrace_samples_trained_total", "Samples trained by this process")
TRAJECTORIES = Counter("headrace_trajectories_trained_total", "Trajectories trained by this process")
TOKENS = Counter("headrace_tokens_trained_total", "Response tokens trained by this process")
UPDATES = Counter("headrace_local_updates_total", "Local updates done by this process")
STALE_SAMPLES = Counter("headrace_stale_samples_trained_total", "Trained samples with a version gap above 0")
STALE_TRAJECTORIES = Counter("headrace_stale_trajectories_trained_total", "The same in trajectories")
VERSION_GAP = Histogram(
    "headrace_version_gap_versions", "Version gap of trained samples", buckets=(0, 1, 2, 3, 4, 6, 8, 16, 32)
)
UPDATE_GAP = Gauge(
    "headrace_update_gap_steps", "Optimizer steps between sampling and training, largest of the update"
)
PARTIAL = Counter("headrace_partial_samples_trained_total", "Trained samples with tokens of several versions")
SPAN = Histogram(
    "headrace_partial_span_versions",
    "Newest minus oldest version in a trained sample",
    buckets=(0, 1, 2, 3, 4, 6, 8, 16, 32),
)
LOGPROB_DIFF = Gauge("headrace_trainer_canary_logprob_diff", "Log-prob difference in the last canary")
_GAUGES = {
    key: Gauge("headrace_" + key.replace("/", "_"), f"Run log key {key}, of the last local update")
    for key in (
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "rollout_corr/ess",
        "rollout_corr/kl",
        "rollout_corr/k3_kl",
        "rollout_corr/chi2_token",
        "rollout_corr/ppl_ratio",
        "rollout_corr/masked_fraction",
        "staleness/length_order_corr",
        "reward/mean",
        "response_length/mean",
        "group/zero_std_ratio",
    )
}


def observe(
    row: Mapping[str, Any], phases: Mapping[str, float], samples: int, group: int, spans: Sequence[int]
) -> None:
    """One run-log row, and the spans of its samples, into the registry."""
    UPDATE_GAP.set(row["staleness/update_gap/max"])
    for span in spans:
        SPAN.observe(span)
        PARTIAL.inc(span > 0)
    IDLE.set(row["trainer/idle_ratio"])
    WAIT.inc(phases.get("gen_wait", 0.0) + phases.get("wait_prev_gen", 0.0))
    STEP.inc(row["timing_s/step"])
    for name, seconds in phases.items():
        PHASE.labels(phase=name).observe(seconds)
    SAMPLES.inc(samples)
    TRAJECTORIES.inc(samples * group)
    TOKENS.inc(row["perf/tokens_per_s"] * row["timing_s/step"])
    UPDATES.inc()
    for gap, count in row["staleness/version_gap/hist"].items():
        for _ in range(count):
            VERSION_GAP.observe(int(gap))
        if int(gap) > 0:
            STALE_SAMPLES.inc(count)
            STALE_TRAJECTORIES.inc(count * group)
    for key, gauge in _GAUGES.items():
        gauge.set(row[key])
