"""Bounds a run's Redis memory: the gate bounds the number of samples, the limits bound their size.

The bound covers everything that may be in the server at once: `max_required` finished groups of maximum
length, the prompts waiting ahead of the rollouters, the prompts of samples trained since the oldest
checkpoint, and a record of every sample of the run. A group's tokens are removed once it is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config.algorithm_names import estimator_of

if TYPE_CHECKING:
    from headrace.config.run import RunConfig

TOKEN_BYTES = 4 + 4 + 1
"""Bytes of a response token on the wire: id, log-prob and mask."""
_TRAJECTORY_BYTES = 256
"""Segments, reward and its parts."""
_PROMPT_BYTES = 1024
"""Ground truth and extra information."""
_RECORD_BYTES = 1024
"""Record of a sample, kept until the end of the run."""
_OVERHEAD = 1.3
"""Factor for the server's overhead: allocator, append-only buffers, streams."""
_SERVER_BYTES = 16 * 2**20
"""An empty server with its clients."""
TRACE_BYTES = 16 * 2**20
"""Largest size of trace events waiting in the server, in a cluster."""


def largest_sample_bytes(config: RunConfig) -> int:
    """Return the size of a group in which every response has `data.max_response_length` tokens."""
    estimator = estimator_of(config)
    # A user's estimator may not be imported here. At most it needs a greedy response, so assume that.
    group = config.rollout.n + (estimator is None or estimator.greedy_baseline)
    response = config.data.max_response_length * TOKEN_BYTES + _TRAJECTORY_BYTES
    return prompt_bytes(config) + group * response


def prompt_bytes(config: RunConfig) -> int:
    return 4 * config.data.max_prompt_length + _PROMPT_BYTES


def needed_bytes(config: RunConfig) -> int:
    """Return the memory with which the run never stalls because the server is full."""
    total, rule = config.rollout.total_rollout_steps, config.rule
    ahead = config.data.max_ahead or 2 * rule.max_required
    since_checkpoint = total
    if config.trainer.save_freq:
        kept = config.trainer.save_freq * (config.trainer.max_ckpt_to_keep + 1)
        since_checkpoint = min(total, kept * rule.window)
    held = rule.max_required * largest_sample_bytes(config)
    held += (ahead + since_checkpoint) * prompt_bytes(config) + total * _RECORD_BYTES
    held += TRACE_BYTES if config.trace.enable else 0
    return int(_OVERHEAD * held) + _SERVER_BYTES


def too_small(config: RunConfig, limit_bytes: int) -> str | None:
    """Say why `limit_bytes` of memory is not enough; None if it is, or if it is 0 (no limit)."""
    needed = needed_bytes(config)
    if not limit_bytes or needed <= limit_bytes:
        return None
    return (
        f"{megabytes(limit_bytes)} of memory cannot hold what the gate lets in: {config.rule.max_required} "
        f"samples of up to {megabytes(largest_sample_bytes(config))} (rollout.n x data.max_response_length "
        f"tokens), and the records and prompts of the run, need {megabytes(needed)}; give the server that "
        "much, save more often, or lower rollout.n, data.max_response_length or "
        "async_training.staleness_threshold"
    )


def megabytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
