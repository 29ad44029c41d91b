"""Prometheus metrics of the trainer. Only rank 0 shows them; what they tell is summed over all ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.config import RunConfig
from headrace_trainer import heartbeat

disable_created_metrics()  # half of all series, which nobody reads

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

HEARTBEAT = Gauge(
    "headrace_trainer_heartbeat_age_seconds",
    "Seconds since the process of this node that stands still longest, launcher or rank, was seen to get on",
)
IDLE = Gauge("headrace_trainer_idle_ratio", "Seconds waiting for samples over seconds of the last step")
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
SKIPPED = Counter("headrace_actor_skipped_steps_total", "Optimizer steps not taken: something was not finite")
STALE_SAMPLES = Counter("headrace_stale_samples_trained_total", "Trained samples with a version gap above 0")
STALE_TRAJECTORIES = Counter("headrace_stale_trajectories_trained_total", "The same in trajectories")
VERSION_GAP = Histogram("headrace_version_gap_versions", "Version gap of trained samples", buckets=_VERSIONS)
LARGEST_GAP = Gauge("headrace_version_gap_largest_versions", "Largest version gap of the last local update")
GAP_BOUND = Gauge(
    "headrace_version_gap_bound_versions", "Largest version gap that the configuration allows; +Inf for any"
)
UPDATE_GAP = Histogram(
    "headrace_update_gap_steps",
    "Optimizer steps between the weights that sampled and the update",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128),
)
PARTIAL = Counter("headrace_partial_samples_trained_total", "Trained samples with tokens of several versions")
SPAN = Histogram(
    "headrace_partial_span_versions", "Newest minus oldest version in a trained sample", buckets=_VERSIONS
)
LATENCY = Histogram(
    "headrace_queue_message_latency_seconds",
    "Seconds from a sample's finish to its reading by the trainer",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
)
REWARD = Histogram(
    "headrace_reward",
    "Reward of trained trajectories",
    buckets=(-10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10),
)
RESPONSE_TOKENS = Histogram(
    "headrace_trained_response_length_tokens", "Tokens of trained responses", buckets=_TOKENS
)
LENGTH_ORDER = Gauge(
    "headrace_length_order_correlation",
    "Rank correlation of a sample's tokens with its place in the order of training, of the last local update",
)
_GAUGES = {
    key: Gauge("headrace_" + key.replace("/", "_"), f"Run log key {key}, of the last local update")
    for key in (
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "rollout_corr/ess",
        "rollout_corr/kl",
        "rollout_corr/k3_kl",
        "rollout_corr/chi2_token",
        "rollout_corr/ppl_ratio",
        "rollout_corr/clipped_fraction",
        "rollout_corr/masked_fraction",
        "reward/mean",
        "response_length/mean",
        "response_length/clip_ratio",
        "group/zero_std_ratio",
    )
}
_SOMETIMES = ("rollout_corr/clipped_fraction",)
"""Not in every run's rows: 0 where truncation is off."""
for _gauge in (IDLE, LARGEST_GAP, LENGTH_ORDER, *_GAUGES.values()):
    _gauge.set(math.nan)  # before the first update there is no value, and 0 would be one


class Clock(Collector):
    """Seconds of steps, and those of them spent waiting for samples, as counters that also run during a wait.

    A trainer that waits for ever does not end its step: counted at its end, the wait would never be seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the server's thread reads
        self._wait_s = self._step_s = 0.0
        self._counted_s = 0.0
        """Of the wait of the present step, what is in both sums already."""
        self._since: float | None = None
        self._shown = (0.0, 0.0)

    def begin_wait(self, now: float) -> None:
        """`now`: monotonic seconds."""
        with self._lock:
            self._since = now

    def end_wait(self, now: float) -> None:
        with self._lock:
            if self._since is not None:
                waited = max(0.0, now - self._since)
                self._wait_s += waited
                self._step_s += waited
                self._counted_s += waited
            self._since = None

    def step(self, wait_s: float, step_s: float) -> None:
        """A whole step has ended: `wait_s` of its `step_s` seconds were waiting."""
        with self._lock:
            self._wait_s += max(0.0, wait_s - self._counted_s)
            self._step_s += max(0.0, step_s - self._counted_s)
            self._counted_s = 0.0

    def read(self) -> tuple[float, float]:
        """(waiting, all) seconds until now."""
        with self._lock:
            running = 0.0 if self._since is None else max(0.0, time.monotonic() - self._since)
            # A scrape between an instant and the call that tells of it has seen a little more. A counter that
            # steps back, however little, counts as one that began anew.
            wait_s, step_s = self._wait_s + running, self._step_s + running
            self._shown = (max(wait_s, self._shown[0]), max(step_s, self._shown[1]))
            return self._shown

    def collect(self) -> Iterator[Metric]:
        wait_s, step_s = self.read()
        yield CounterMetricFamily(
            "headrace_trainer_wait_seconds", "Seconds in which the trainer waited for samples", value=wait_s
        )
        yield CounterMetricFamily(
            "headrace_trainer_step_seconds", "Seconds of all local updates, waiting included", value=step_s
        )


CLOCK = Clock()
prometheus_client.REGISTRY.register(CLOCK)


@dataclass(frozen=True)
class Observed:
    """What one local update trained: one value per sample, or per trajectory, of all ranks."""

    spans: Sequence[int]
    update_gaps: Sequence[int]
    latencies_s: Sequence[float]
    rewards: Sequence[float]
    lengths: Sequence[int]


def configure(config: RunConfig) -> None:
    """What is known before the first update."""
    bound = config.rule.largest_gap
    GAP_BOUND.set(math.inf if bound is None else bound)


def observe(
    row: Mapping[str, Any], phases: Mapping[str, float], samples: int, group: int, seen: Observed
) -> None:
    """One run-log row, and what it was made of, into the registry."""
    for span in seen.spans:
        SPAN.observe(span)
        PARTIAL.inc(span > 0)
    for histogram, values in (
        (UPDATE_GAP, seen.update_gaps),
        (LATENCY, seen.latencies_s),
        (REWARD, seen.rewards),
        (RESPONSE_TOKENS, seen.lengths),
    ):
        for value in values:
            histogram.observe(value)
    IDLE.set(row["trainer/idle_ratio"])
    CLOCK.step(phases.get("gen_wait", 0.0) + phases.get("wait_prev_gen", 0.0), row["timing_s/step"])
    for name, seconds in phases.items():
        PHASE.labels(phase=name).observe(seconds)
    SAMPLES.inc(samples)
    TRAJECTORIES.inc(samples * group)
    TOKENS.inc(row["perf/tokens_per_s"] * row["timing_s/step"])
    UPDATES.inc()
    SKIPPED.inc(row["actor/skipped_steps"])
    LARGEST_GAP.set(row["staleness/version_gap/max"])
    for gap, count in row["staleness/version_gap/hist"].items():
        for _ in range(count):
            VERSION_GAP.observe(int(gap))
        if int(gap) > 0:
            STALE_SAMPLES.inc(count)
            STALE_TRAJECTORIES.inc(count * group)
    LENGTH_ORDER.set(row["staleness/length_order_corr"])
    for key, gauge in _GAUGES.items():
        gauge.set(row.get(key, 0.0) if key in _SOMETIMES else row[key])


def show_heartbeat(directory: Path) -> None:
    """`directory`: of this node's heartbeats."""

    def age_s() -> float:
        try:
            return max(0.0, heartbeat.age_s(directory))
        except OSError:  # the launcher has gone
            return math.nan

    HEARTBEAT.set_function(age_s)


def process_only() -> CollectorRegistry:
    """For a node whose ranks are none of them the first: that it is up and gets on, what its process uses."""
    registry = CollectorRegistry()
    registry.register(HEARTBEAT)
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    return registry
