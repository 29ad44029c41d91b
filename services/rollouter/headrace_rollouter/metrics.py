"""Prometheus metrics of the rollouter; vLLM's own are in the same default registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SAMPLES = Counter("headrace_samples_generated_total", "Samples finished by this rollouter")
FAILED = Counter("headrace_samples_failed_total", "Failures of samples by reason", ["reason"])
FENCED = Counter("headrace_samples_fenced_total", "Results that the ledger refused as late")
ACTIVE = Counter(
    "headrace_rollouter_active_seconds_total", "Seconds in which the engine had a running request"
)
WINDOW = Counter("headrace_rollouter_window_seconds_total", "Seconds in which the engine could have run")
RUNNING = Gauge("headrace_rollouter_running_sequences", "Sequences running in the engine")
TARGET = Gauge("headrace_rollouter_target_sequences", "Sequences that run when every slot is taken")
VERSION = Gauge(
    "headrace_rollouter_policy_version", "Policy version that this engine runs; -1 before the first"
)
RESPONSE_TOKENS = Histogram(
    "headrace_response_length_tokens",
    "Tokens of finished responses",
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
