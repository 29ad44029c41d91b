"""Describes a configuration's mode to users, and how to get to the next mode."""

from __future__ import annotations

import os

from headrace.config.run import RunConfig
from headrace.config.staleness import Mode

MEANING: dict[Mode, str] = {
    Mode.COLOCATED_SYNC: "generate everything, then train everything; every phase has all cores, or all GPUs",
    Mode.ONE_STEP_OFF: "the next batch is generated while this one trains; they meet at every sync",
    Mode.ON_POLICY_PIPELINE: "generation and training take turns on resources of their own",
    Mode.STREAM_OFF_POLICY: "several local updates on the samples of one version, then a sync",
    Mode.ASYNC_STALE: "generation runs ahead up to the gate; running work finishes before a sync",
    Mode.ASYNC_PARTIAL: "generation runs ahead up to the gate; a sync interrupts running work, which goes on "
    "under the new weights",
}

NEXT: dict[Mode, str] = {
    Mode.COLOCATED_SYNC: "leave out mode, for on_policy_pipeline: both sides keep resources of their own",
    Mode.ONE_STEP_OFF: "leave out mode and set async_training.trigger_parameter_sync_step to 2 or more with "
    "staleness_threshold 0.5, for async_stale_samples: the trainer no longer waits at every boundary",
    Mode.ON_POLICY_PIPELINE: "set async_training.trigger_parameter_sync_step to 2 or more, for "
    "stream_off_policy: fewer syncs, and the rollouters wait less often",
    Mode.STREAM_OFF_POLICY: "set async_training.staleness_threshold above 0 (0.1 to 0.5) with "
    "partial_rollout false, for async_stale_samples: generation no longer waits for the trainer",
    Mode.ASYNC_STALE: "set async_training.partial_rollout to true, for async_partial_rollout: a sync no "
    "longer waits for the longest answer",
    Mode.ASYNC_PARTIAL: "this is the last one; set async_training.max_version_gap to bound the gap",
}


def describe(c: RunConfig) -> list[str]:
    """Return lines of text: the mode, its meaning, its numbers, and how to get to the next one."""
    a, rule = c.async_training, c.rule
    s, r, m = a.trigger_parameter_sync_step, a.require_batches, c.actor.ppo_mini_batch_size
    gap = "unbounded" if rule.largest_gap is None else str(rule.largest_gap)
    return [
        f"mode: {c.derived_mode}",
        f"  {MEANING[c.derived_mode]}",
        f"samples per sync: {rule.window} (S x R x M = {s} x {r} x {m})",
        f"max_required: {rule.max_required} samples started and not yet left behind by a sync "
        f"(staleness_threshold {a.staleness_threshold:g})",
        f"largest version gap: {gap}",
        f"off-policy optimizer steps within a window: {rule.off_policy_steps} (S x R - 1)",
        f"next mode: {NEXT[c.derived_mode]}",
    ]


def warnings(c: RunConfig) -> list[str]:
    """Return warnings about settings that are valid but often unintended, each with its reason."""
    out = []
    eta = c.async_training.staleness_threshold
    if eta >= 1 and c.mode is None:
        out.append(
            f"async_training.staleness_threshold = {eta:g}: with 1 or more every sample may be a whole "
            "window old before it is trained, and more data waits than is used; below 1 is recommended"
        )
    slots = c.rollout.replicas * c.rollout.max_concurrent_samples
    if c.mode == "one_step_off" and 0 < slots < c.samples_per_update:
        out.append(
            f"mode: one_step_off generates a batch of {c.samples_per_update} samples under one version, "
            f"but the rollouters have {slots} places: the rest starts under the next one; raise "
            "rollout.max_concurrent_samples or rollout.replicas"
        )
    if c.gpu_sharing is not None:
        used, there = c.rollout.replicas * c.rollout.engine.tensor_parallel_size, c.world_size
        if used % there:
            out.append(
                f"mode: colocated_sync means all {there} GPUs for each phase, but the engines use {used}: "
                "set rollout.replicas so that every GPU has equally many"
            )
    elif c.mode == "colocated_sync":
        cores = os.cpu_count() or 1
        uses = {
            "trainer.omp_threads": c.world_size * c.trainer.omp_threads,
            "rollout.engine.omp_threads": c.rollout.replicas * c.rollout.engine.omp_threads,
        }
        out += [
            f"mode: colocated_sync means all {cores} cores for each phase, but {key} and the number of "
            f"processes use {found}: raise one of them"
            for key, found in uses.items()
            if found < cores
        ]
    return out
