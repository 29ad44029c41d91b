"""How much memory of the server a run can take: the gate bounds the samples, the limits bound each of them.

What is counted is what may lie in the server at once: `max_required` finished groups of the longest kind, the
prompts that wait ahead of the rollouters and those of what was trained since the oldest checkpoint, and a
record of every sample of the run. Once a group is trained its tokens are removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config.algorithm_names import estimator_of

if TYPE_CHECKING:
    from headrace.config.run import RunConfig

TOKEN_BYTES = 4 + 4 + 1
"""Id, log-prob and mask of a response token on the wire."""
_TRAJECTORY_BYTES = 256
"""Segments, reward and its parts."""
_PROMPT_BYTES = 1024
"""Ground truth and extra information."""
_RECORD_BYTES = 1024
"""What stays of a sample until the end of the run."""
_OVERHEAD = 1.3
"""Of the server: allocator, append-only buffers, streams."""
_SERVER_BYTES = 16 * 2**20
"""An empty server with its clients."""
TRACE_BYTES = 16 * 2**20
"""Most that waits there of a timeline, in a cluster."""


def largest_sample_bytes(config: RunConfig) -> int:
    """A group whose every response reaches `data.max_response_length`."""
    estimator = estimator_of(config)
    # One of the user's cannot be asked where it is not imported: at most it wants a greedy response.
    group = config.rollout.n + (estimator is None or estimator.greedy_baseline)
    response = config.data.max_response_length * TOKEN_BYTES + _TRAJECTORY_BYTES
    return prompt_bytes(config) + group * response


def prompt_bytes(config: RunConfig) -> int:
    return 4 * config.data.max_prompt_length + _PROMPT_BYTES


def needed_bytes(config: RunConfig) -> int:
    """What the server must be able to hold, for the run never to stand still for want of memory."""
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
    """Why a server that may use `limit_bytes` is not enough; None when it is, or 0 (no limit)."""
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
