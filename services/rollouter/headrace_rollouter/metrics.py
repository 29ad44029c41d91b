"""Prometheus metrics of the rollouter; vLLM's own are in the same default registry.

vLLM counts in this process, also where the engine's core and its workers are processes of their own.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from headrace.late_gauge import LateGauge
from headrace.ledger.replies import TakeStatus

disable_created_metrics()  # half of all series, which nobody reads

SAMPLES = Counter("headrace_samples_generated_total", "Samples finished by this rollouter")
TOKENS = Counter("headrace_tokens_generated_total", "Response tokens generated, also by work that was let go")
FAILED = Counter("headrace_samples_failed_total", "Failures of samples by reason", ["reason"])
FENCED = Counter("headrace_samples_fenced_total", "Results that the ledger refused as late")
ACTIVE = Counter(
    "headrace_rollouter_active_seconds_total", "Seconds in which the engine had a running request"
)
WINDOW = Counter("headrace_rollouter_window_seconds_total", "Seconds in which the engine could have run")
IDLE = LateGauge(
    "headrace_rollouter_idle_ratio",
    "Share of the time of the version before this one in which the engine had no running request",
)
RUNNING = Gauge("headrace_rollouter_running_sequences", "Sequences running in the engine")
TARGET = Gauge("headrace_rollouter_target_sequences", "Sequences that run when every slot is taken")
SERVING = Gauge(
    "headrace_rollouter_serving", "1 while the engine runs under a committed version; 0 while it is paused"
)
VERSION = Gauge(
    "headrace_rollouter_policy_version", "Policy version that this engine runs; -1 before the first"
)
RESPONSE_TOKENS = Histogram(
    "headrace_response_length_tokens",
    "Tokens of finished responses, by why they ended",
    ["finish_reason"],
    buckets=(4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
)
MEMORY = Gauge(
    "headrace_rollouter_waits_for_memory", "1 while results wait because the Redis server's memory is used up"
)
TAKES = Counter("headrace_rollouter_takes_total", "Requests for work by the ledger's answer", ["status"])
ENVIRONMENT_SECONDS = Histogram(
    "headrace_environment_call_seconds",
    "Seconds of one call of the environment",
    ["call"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60),
)
REWARD_SECONDS = Histogram(
    "headrace_reward_call_seconds",
    "Seconds of one call of the reward, of any source, waiting for its turn included",
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)

FAILURES = ("malformed", "timeout", "generation_error", "environment_error", "reward_error")
"""What a rollouter fails a sample with."""

VERSION.set(-1)
# From the start at 0: the first of a kind would not show as an increase.
for _reason in FAILURES:
    FAILED.labels(reason=_reason)
for _reason in ("stop", "length", "turn_limit"):
    RESPONSE_TOKENS.labels(finish_reason=_reason)
for _status in TakeStatus:
    TAKES.labels(status=str(_status))


class Usage:
    """Turns the engine's sums into counters, and into the idle ratio of each version that has ended."""

    def __init__(self) -> None:
        self._active_s = self._window_s = 0.0
        self._tokens = 0
        self._version = -1
        self._began = (0.0, 0.0)
        """(active, window) seconds at the start of the present version."""

    def seen(self, active_s: float, window_s: float, tokens: int, version: int) -> None:
        """Sums since the process started; what went backward is left out."""
        ACTIVE.inc(max(0.0, active_s - self._active_s))
        WINDOW.inc(max(0.0, window_s - self._window_s))
        TOKENS.inc(max(0, tokens - self._tokens))
        self._active_s, self._window_s, self._tokens = active_s, window_s, tokens
        if version != self._version:
            could = window_s - self._began[1]
            if could > 0 and self._version >= 0:  # before the first version there was nothing to run
                IDLE.set(min(1.0, max(0.0, 1.0 - (active_s - self._began[0]) / could)))
            self._version, self._began = version, (active_s, window_s)
