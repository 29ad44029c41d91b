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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.config import RunConfig
from headrace.late_gauge import LateGauge
from headrace_trainer import heartbeat

disable_created_metrics()  # half of all series, which nobody reads

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

HEARTBEAT = Gauge(
    "headrace_trainer_heartbeat_age_seconds",
    "Seconds since the process of this node that stands still longest, launcher or rank, was seen to get on",
)
IDLE = LateGauge("headrace_trainer_idle_ratio", "Seconds waiting for samples over seconds of the last step")
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
STALE_TRAJECTORIES = Counter(
    "headrace_stale_trajectories_trained_total", "Trained trajectories with a version gap above 0"
)
VERSION_GAP = Histogram("headrace_version_gap_versions", "Version gap of trained samples", buckets=_VERSIONS)
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
LENGTH_ORDER = LateGauge(
    "headrace_length_order_correlation",
    "Rank correlation of a sample's tokens with its place in the order of training, of the last local update",
)
_GAUGES = {
    key: LateGauge("headrace_" + key.replace("/", "_"), f"{text}; of the last local update")
    for key, text in {
        "actor/pg_loss": "Policy loss, mean over the trained tokens",
        "actor/pg_clipfrac": "Share of the tokens whose policy ratio the loss clipped",
        "actor/pg_clipfrac_lower": "Share of the tokens that the dual clip bounded",
        "actor/ppo_kl": "KL divergence from the old policy to the current one, per token",
        "actor/entropy": "Entropy of the policy in nats, mean over the trained tokens",
        "actor/grad_norm": "Norm of the policy's gradient before clipping, in the last optimizer step",
        "actor/lr": "Learning rate of the policy",
        "rollout_corr/ess": "Effective share of the samples by their importance weights as they are, 0 to 1",
        "rollout_corr/kl": "KL divergence from the sampling policy to the current one, per token",
        "rollout_corr/k3_kl": "KL divergence from the sampling policy by the k3 estimator, per token",
        "rollout_corr/chi2_token": "Chi-squared divergence from the sampling policy: mean of w^2 - 1",
        "rollout_corr/ppl_ratio": "Perplexity under the current policy over that under the sampling one",
        "rollout_corr/clipped_fraction": "Share of the importance weights that truncation bounded",
        "rollout_corr/masked_fraction": "Share of the tokens left out by the loss or the rollout correction",
        "reward/mean": "Mean reward of the trained trajectories",
        "response_length/mean": "Mean tokens of a trained response, the environment's included",
        "response_length/clip_ratio": "Share of the trained responses that the limit cut",
        "group/zero_std_ratio": "Share of the groups whose rewards are all equal, which teach nothing",
    }.items()
}
"""By run log key."""
_SOMETIMES = ("rollout_corr/clipped_fraction",)
"""Not in every run's rows: 0 where truncation is off."""


class Gaps(Collector):
    """The largest version gap of an update beside what it was held against.

    An alert compares the two: after a change of the bound one must not be seen without the other.
    """

    def __init__(self) -> None:
        self._shown: tuple[float | None, float | None] = (None, None)

    def show(self, largest: float | None, bound: float | None) -> None:
        """Versions; None: not known yet. A bound of infinity stands for none."""
        self._shown = (largest, bound)

    def collect(self) -> Iterator[Metric]:
        largest, bound = self._shown
        for end, text, value in (
            ("largest", "Largest version gap of the last local update", largest),
            ("bound", "Largest version gap that was allowed in the last local update; +Inf for any", bound),
        ):
            yield GaugeMetricFamily(f"headrace_version_gap_{end}_versions", text, value=value)


GAPS = Gaps()
prometheus_client.REGISTRY.register(GAPS)


class Clock(Collector):
    """Seconds of steps, and those of them spent waiting for samples, as counters that run all the time.

    A trainer that waits for ever does not end its step, and an update may take longer than the time over
    which a ratio of the two is taken: what were counted at its end would be missing, then come all at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the server's thread reads, and the sync client's ends a wait
        self._began: float | None = None
        self._wait_s = 0.0
        self._counted_s = 0.0
        """Of the wait of the present step, what is in the sum already."""
        self._since: float | None = None
        self._until_transfer = False
        self._shown = (0.0, 0.0)

    def begin_wait(self, now: float, until_transfer: bool = False) -> None:
        """`now`: monotonic seconds. The first wait begins with the first step."""
        with self._lock:
            if self._began is None:
                self._began = now
            self._since, self._until_transfer = now, until_transfer

    def end_wait(self, now: float) -> None:
        with self._lock:
            self._end(now)

    def transfer_begins(self, now: float) -> None:
        """Of the wait for work that a round lets finish first, this is the end. Other waits go on."""
        with self._lock:
            if self._until_transfer:
                self._end(now)

    def _end(self, now: float) -> None:
        if self._since is not None:
            waited = max(0.0, now - self._since)
            self._wait_s += waited
            self._counted_s += waited
        self._since = None

    def step_ended(self, wait_s: float) -> None:
        """`wait_s` of its seconds were waiting: what was not seen to be waiting is counted now."""
        with self._lock:
            self._wait_s += max(0.0, wait_s - self._counted_s)
            self._counted_s = 0.0

    def read(self, now: float | None = None) -> tuple[float, float]:
        """(waiting, all) seconds until now."""
        with self._lock:
            now = time.monotonic() if now is None else now
            wait_s = self._wait_s + (0.0 if self._since is None else max(0.0, now - self._since))
            step_s = 0.0 if self._began is None else max(0.0, now - self._began)
            # A scrape between an instant and the call that tells of it has seen a little more. A counter that
            # steps back, however little, counts as one that began anew.
            self._shown = (max(wait_s, self._shown[0]), max(step_s, self._shown[1]))
            return self._shown

    def collect(self) -> Iterator[Metric]:
        wait_s, step_s = self.read()
        yield CounterMetricFamily(
            "headrace_trainer_wait_seconds",
            "Seconds until now in which the trainer waited for samples",
            value=wait_s,
        )
        yield CounterMetricFamily(
            "headrace_trainer_step_seconds",
            "Seconds of local updates until now, waiting included",
            value=step_s,
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
    stale_trajectories: int
    """With a token that is older than the window's version."""


def configure(config: RunConfig) -> None:
    """What is known before the first update."""
    bound = config.rule.largest_gap
    GAPS.show(None, math.inf if bound is None else bound)


def observe(
    row: Mapping[str, Any],
    phases: Mapping[str, float],
    samples: int,
    group: int,
    seen: Observed,
    gap_bound: float,
) -> None:
    """One run-log row, and what it was made of, into the registry. `gap_bound`: largest version gap that was
    allowed in the update, versions; infinity for any."""
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
    CLOCK.step_ended(phases.get("gen_wait", 0.0) + phases.get("wait_prev_gen", 0.0))
    for name, seconds in phases.items():
        PHASE.labels(phase=name).observe(seconds)
    SAMPLES.inc(samples)
    TRAJECTORIES.inc(samples * group)
    TOKENS.inc(row["perf/tokens_per_s"] * row["timing_s/step"])
    UPDATES.inc()
    SKIPPED.inc(row["actor/skipped_steps"])
    GAPS.show(row["staleness/version_gap/max"], gap_bound)
    for gap, count in row["staleness/version_gap/hist"].items():
        for _ in range(count):
            VERSION_GAP.observe(int(gap))
        if int(gap) > 0:
            STALE_SAMPLES.inc(count)
    STALE_TRAJECTORIES.inc(seen.stale_trajectories)
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
