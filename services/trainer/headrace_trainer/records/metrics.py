"""The trainer's Prometheus metrics. Only rank 0 exposes them; they are sums over all ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.config.run import RunConfig
from headrace.metrics import row_keys
from headrace.metrics import trainer as table
from headrace_trainer.distributed import heartbeat

table.SERVICE.show()


class Gaps(Collector):
    """The largest version gap of an update and the bound that applied to it.

    An alert compares the two, so a scrape must never see one without the other after a change of the bound.
    """

    def __init__(self) -> None:
        self._shown: tuple[float | None, float | None] = (None, None)

    def show(self, largest: float | None, bound: float | None) -> None:
        """Set both, in versions. None means not known yet; a bound of infinity means no bound."""
        self._shown = (largest, bound)

    def collect(self) -> Iterator[Metric]:
        largest, bound = self._shown
        yield table.LARGEST_GAP.value(largest)
        yield table.GAP_BOUND.value(bound)


GAPS = Gaps()
prometheus_client.REGISTRY.register(GAPS)


class Clock(Collector):
    """Seconds of steps, and those of them spent waiting for samples, as counters that advance continuously.

    Counting only at the end of a step would not do. A trainer that waits for ever never ends its step, and an
    update may outlast the interval over which the ratio is taken: its time would be missing, then jump.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the server's thread reads; the sync client's thread ends a wait
        self._began: float | None = None
        self._wait_s = 0.0
        self._counted_s = 0.0
        """Part of the present step's wait that is already in the sum."""
        self._since: float | None = None
        self._until_transfer = False
        self._shown = (0.0, 0.0)

    def begin_wait(self, now: float, until_transfer: bool = False) -> None:
        """Begin a wait. `now`: monotonic seconds. The first wait begins with the first step."""
        with self._lock:
            if self._began is None:
                self._began = now
            self._since, self._until_transfer = now, until_transfer

    def end_wait(self, now: float) -> None:
        with self._lock:
            self._end(now)

    def transfer_begins(self, now: float) -> None:
        """End the wait for running work that a round lets finish first. Other waits continue."""
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
        """End a step that waited for `wait_s` seconds. Waiting not counted so far is counted now."""
        with self._lock:
            self._wait_s += max(0.0, wait_s - self._counted_s)
            self._counted_s = 0.0

    def read(self, now: float | None = None) -> tuple[float, float]:
        """(waiting, total) seconds until now."""
        with self._lock:
            now = time.monotonic() if now is None else now
            wait_s = self._wait_s + (0.0 if self._since is None else max(0.0, now - self._since))
            step_s = 0.0 if self._began is None else max(0.0, now - self._began)
            # A scrape between an event and the call that reports it has seen slightly more. A counter must
            # not step back, however little: Prometheus would take that for a reset.
            self._shown = (max(wait_s, self._shown[0]), max(step_s, self._shown[1]))
            return self._shown

    def collect(self) -> Iterator[Metric]:
        wait_s, step_s = self.read()
        yield table.WAIT_SECONDS.value(wait_s)
        yield table.STEP_SECONDS.value(step_s)


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
    """Trajectories with a token older than the window's version."""


def configure(config: RunConfig) -> None:
    """Set what is known before the first update."""
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
    """Put one run-log row and its source data into the registry. `gap_bound`: largest version gap allowed in
    the update, in versions; infinity if unbounded."""
    for span in seen.spans:
        table.SPAN.observe(span)
        table.PARTIAL.inc(span > 0)
    for histogram, values in (
        (table.UPDATE_GAP, seen.update_gaps),
        (table.LATENCY, seen.latencies_s),
        (table.REWARD, seen.rewards),
        (table.RESPONSE_TOKENS, seen.lengths),
    ):
        for value in values:
            histogram.observe(value)
    table.IDLE.set(row[row_keys.TRAINER_IDLE_RATIO])
    CLOCK.step_ended(phases.get("gen_wait", 0.0) + phases.get("wait_prev_gen", 0.0))
    for name, seconds in phases.items():
        table.PHASE.labels(phase=name).observe(seconds)
    table.SAMPLES.inc(samples)
    table.TRAJECTORIES.inc(samples * group)
    table.TOKENS.inc(row[row_keys.PERF_TOKENS_PER_S] * row[row_keys.TIMING_S_STEP])
    table.UPDATES.inc()
    table.SKIPPED.inc(row[row_keys.ACTOR_SKIPPED_STEPS])
    GAPS.show(row[row_keys.STALENESS_VERSION_GAP_MAX], gap_bound)
    for gap, count in row[row_keys.STALENESS_VERSION_GAP_HIST].items():
        for _ in range(count):
            table.VERSION_GAP.observe(int(gap))
        if int(gap) > 0:
            table.STALE_SAMPLES.inc(count)
    table.STALE_TRAJECTORIES.inc(seen.stale_trajectories)
    table.LENGTH_ORDER.set(row[row_keys.STALENESS_LENGTH_ORDER_CORR])
    for key, gauge in table.GAUGES.items():
        absent = row_keys.TABLE.entries[key].absent
        gauge.set(row[key] if absent is None else row.get(key, absent))


def show_heartbeat(directory: Path) -> None:
    """Export the age of the heartbeats in `directory`, this node's."""

    def age_s() -> float:
        try:
            return max(0.0, heartbeat.age_s(directory))
        except OSError:  # the launcher has ended
            return math.nan

    table.HEARTBEAT.set_function(age_s)


def process_only() -> CollectorRegistry:
    """Metrics of a node without rank 0: that it is up and alive, and what its process uses."""
    registry = CollectorRegistry()
    registry.register(table.HEARTBEAT)
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    return registry
