"""Prometheus metrics of the rollouter; vLLM's own are in the same registry."""

from __future__ import annotations

from headrace.ledger.replies import TakeStatus
from headrace.metrics.series import Service
from headrace.metrics.views import Graph

SERVICE = Service("rollouter")

FAILURES = ("malformed", "timeout", "generation_error", "environment_error", "reward_error")
"""What a rollouter fails a sample with."""

SAMPLES = SERVICE.counter("headrace_samples_generated_total", "Samples finished by this rollouter")
TOKENS = SERVICE.counter(
    "headrace_tokens_generated_total", "Response tokens generated, including those of abandoned work"
)
FAILED = SERVICE.counter("headrace_samples_failed_total", "Sample failures by reason", {"reason": FAILURES})
FENCED = SERVICE.counter("headrace_samples_fenced_total", "Results that the ledger refused as late")
ACTIVE = SERVICE.counter(
    "headrace_rollouter_active_seconds_total", "Seconds in which the engine had a running request"
)
WINDOW = SERVICE.counter(
    "headrace_rollouter_window_seconds_total", "Seconds in which the engine could have run"
)
IDLE = SERVICE.late_gauge(
    "headrace_rollouter_idle_ratio",
    "Share of the previous version's time in which the engine had no running request",
    unread="counters give the same over any time range",
)
RUNNING = SERVICE.gauge("headrace_rollouter_running_sequences", "Sequences running in the engine")
TARGET = SERVICE.gauge("headrace_rollouter_target_sequences", "Running sequences when every slot is taken")
SERVING = SERVICE.gauge(
    "headrace_rollouter_serving",
    "1 while the engine runs under a committed version; 0 while it is paused",
    unread="a state, of interest at one moment",
)
VERSION = SERVICE.gauge(
    "headrace_rollouter_policy_version", "Policy version that this engine runs; -1 before the first"
)
RESPONSE_TOKENS = SERVICE.histogram(
    "headrace_response_length_tokens",
    "Tokens of finished responses, by finish reason",
    {"finish_reason": ("stop", "length", "turn_limit")},
    buckets=(4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    graph=Graph(
        "Balance",
        "Response length",
        "none",
        about="Tokens of finished responses. Everybody waits for a long tail.",
    ),
)
MEMORY = SERVICE.gauge(
    "headrace_rollouter_waits_for_memory", "1 while results wait because the Redis server's memory is used up"
)
TAKES = SERVICE.counter(
    "headrace_rollouter_takes_total",
    "Requests for work by the ledger's answer",
    {"status": [str(status) for status in TakeStatus]},
)
ENVIRONMENT_SECONDS = SERVICE.histogram(
    "headrace_environment_call_seconds",
    "Duration of one environment call, in seconds",
    {"call": ()},
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60),
    unread="only with a multi-turn environment",
)
REWARD_SECONDS = SERVICE.histogram(
    "headrace_reward_call_seconds",
    "Duration of one reward call, of any source, queueing included, in seconds",
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
    graph=Graph(
        "Balance",
        "Seconds of the reward",
        "s",
        about="Of one call, of any source. A sample keeps its slots until its last reward has arrived.",
    ),
)

VERSION.set(-1)
