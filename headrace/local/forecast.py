"""Estimate what a configuration needs: processes, memory, GPUs and nodes. Loads no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from headrace.config import gpu_arithmetic as arithmetic
from headrace.config import redis_memory as server
from headrace.config.run import RunConfig
from headrace.local.services import plan
from headrace.models.memory import (
    SERVICES_BYTES,
    EngineNeed,
    ModelShape,
    Need,
    engine_host_bytes,
    engine_need,
    gigabytes,
    memory_problems,
    model_shape,
    rank_need,
)

GIB = 2**30


@dataclass(frozen=True)
class Machines:
    """The hardware that the estimate is compared with."""

    gpus_per_node: int = 8
    gpu_gib: float = 80.0
    """Memory of one GPU."""
    nodes: int | None = None
    """Number of nodes available; None if unknown."""


@dataclass
class Forecast:
    facts: dict[str, Any] = field(default_factory=dict)
    """For `--json`."""
    lines: list[str] = field(default_factory=list)
    """For people."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def forecast(config: RunConfig, machines: Machines) -> Forecast:
    """Estimate for `config`, whose paths are resolved. Skips unreadable models; preflight reports them."""
    found = Forecast()
    _plan(config, found)
    try:
        policy = model_shape(Path(config.model.path))
        critic = model_shape(Path(config.critic.path or config.model.path)) if config.critic.enable else None
        reference = model_shape(Path(config.ref.path or config.model.path)) if config.uses_reference else None
    except ValueError as error:
        found.warnings.append(f"memory was not estimated: {error}")
    else:
        _memory(config, machines, found, policy, rank_need(config, policy, critic, reference))
    _gpus(config, machines, found)
    return found


def _plan(c: RunConfig, found: Forecast) -> None:
    made = plan(c)
    found.facts["plan"] = {
        "mode": str(c.derived_mode),
        "samples_per_sync": c.rule.window,
        "max_required": c.rule.max_required,
        "updates": made.updates,
        "syncs": made.syncs,
        "processes": made.processes,
        "trainer_ranks": c.world_size,
        "redis": "bundled" if c.redis.url is None else "external",
    }
    found.lines += [
        f"updates: {made.updates} (syncs: {made.syncs})",
        f"processes: {', '.join(made.processes)}; the trainer runs {c.world_size} ranks",
    ]


def _memory(c: RunConfig, machines: Machines, found: Forecast, shape: ModelShape, rank: Need) -> None:
    on_gpu = c.trainer.device == "cuda"
    gpu_bytes = int(machines.gpu_gib * GIB) if on_gpu else None
    engine = engine_need(c, shape, gpu_bytes)
    found.problems += memory_problems(engine, c)
    facts: dict[str, Any] = {
        "parameters": shape.parameters,
        "tied": shape.tied,
        "trainer_rank": {
            "device": {part.name: part.bytes for part in rank.device},
            "host": {part.name: part.bytes for part in rank.host},
            "device_bytes": rank.device_bytes,
            "host_bytes": rank.host_bytes,
        },
        "engine": {
            "weights_bytes_per_gpu": engine.weights,
            "kv_bytes_per_token": engine.kv_token,
            "kv_cache_bytes": engine.kv_cache,
            "longest_sequences_at_once": engine.sequences,
            "host_bytes": engine_host_bytes(c, engine),
        },
        "redis_bytes": server.needed_bytes(c),
    }
    found.facts["memory"] = facts
    found.lines.append(
        f"model: {shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers, vocabulary "
        f"{shape.vocabulary}" + (", tied head" if shape.tied else "")
    )
    where = "on its GPU" if on_gpu else "of memory"
    total = rank.device_bytes + (0 if on_gpu else rank.host_bytes)
    found.lines.append(f"a trainer rank needs about {gigabytes(total)} {where}:")
    parts = rank.device + (() if on_gpu else rank.host)
    found.lines += [f"  {gigabytes(part.bytes):>8}  {part.name}" for part in parts]
    if on_gpu:
        found.lines.append(f"  and {gigabytes(rank.host_bytes)} on the host")
    found.lines += _engine_lines(c, engine)
    found.lines.append(f"the Redis server needs up to {gigabytes(server.needed_bytes(c))}")
    if gpu_bytes is not None:
        _fits_gpus(c, machines, found, rank, gpu_bytes)
    else:
        _fits_machine(c, found, facts, rank, engine)


def _engine_lines(c: RunConfig, engine: EngineNeed) -> Iterator[str]:
    per = "per GPU " if c.trainer.device == "cuda" else ""
    yield (
        f"an engine needs {per}{gigabytes(engine.weights)} for weights and {engine.kv_token / 1e3:,.1f} KB "
        "of KV cache a token"
    )
    if engine.kv_cache is not None:
        yield (
            f"  a KV cache of {gigabytes(engine.kv_cache)} holds {engine.sequences} sequences of "
            f"{engine.longest} tokens; rollout.engine.max_num_seqs is {engine.max_num_seqs}"
        )


def _fits_gpus(c: RunConfig, machines: Machines, found: Forecast, rank: Need, gpu_bytes: int) -> None:
    if (shared := c.gpu_sharing) is not None:
        room = int(shared.trainer_share * gpu_bytes)
        if rank.device_bytes > room:
            found.warnings.append(
                f"a trainer rank needs about {gigabytes(rank.device_bytes)}, but a GPU of "
                f"{machines.gpu_gib:g} GiB has {gigabytes(room)} for it beside its engines "
                f"({shared.engines} x {shared.engine_share:g}): lower "
                "rollout.engine.gpu_memory_utilization or actor.ppo_max_token_len_per_gpu, or use more ranks"
            )
    elif rank.device_bytes > 0.9 * gpu_bytes:
        found.warnings.append(
            f"a trainer rank needs about {gigabytes(rank.device_bytes)}, more than 90 % of a GPU of "
            f"{machines.gpu_gib:g} GiB: use more ranks (trainer.nnodes, trainer.n_gpus_per_node) or lower "
            "actor.ppo_max_token_len_per_gpu"
        )


def _fits_machine(
    c: RunConfig, found: Forecast, facts: dict[str, Any], rank: Need, engine: EngineNeed
) -> None:
    total = (
        c.world_size * (rank.device_bytes + rank.host_bytes)
        + c.rollout.replicas * engine_host_bytes(c, engine)
        + SERVICES_BYTES
        + server.needed_bytes(c)
    )
    there = int(psutil.virtual_memory().total)
    facts["local_run_bytes"], facts["machine_bytes"] = total, there
    found.lines.append(
        f"a run on this machine needs about {gigabytes(total)} in all (ranks: {c.world_size}, "
        f"engines: {c.rollout.replicas} of {gigabytes(engine_host_bytes(c, engine))} each, services, Redis); "
        f"the machine has {gigabytes(there)}"
    )
    if total > there:
        found.warnings.append(
            f"a run on this machine needs about {gigabytes(total)} of memory, but it has {gigabytes(there)}: "
            "use fewer ranks or rollouters, or lower actor.ppo_max_token_len_per_gpu or "
            "rollout.engine.kv_cache_memory_bytes"
        )


def _gpus(c: RunConfig, machines: Machines, found: Forecast) -> None:
    """Count GPUs even for a CPU run: the same configuration may go to a cluster."""
    t, parallel = c.trainer, c.rollout.engine.tensor_parallel_size
    batches = arithmetic.BatchPlan(
        samples=c.rollout.total_rollout_steps,
        per_update=c.samples_per_update,
        mini_batch=c.actor.ppo_mini_batch_size,
        ranks=c.world_size,
    )
    found.warnings += arithmetic.batch_notes(batches)
    fewest, most = arithmetic.samples_per_rank(batches.mini_batch, batches.ranks)
    each = str(most) if fewest == most else f"{fewest} to {most}"
    found.lines.append(
        f"batches: {c.async_training.require_batches} of {batches.mini_batch} samples in an update, {each} "
        f"samples x {c.rollout.n} trajectories on each rank"
    )
    found.facts["batches"] = {
        "per_update": batches.per_update,
        "mini_batch": batches.mini_batch,
        "samples_per_rank": [fewest, most],
        "whole_updates": batches.whole_updates,
        "rest": batches.rest,
    }
    try:
        gpus = arithmetic.gpus(
            t.nnodes,
            t.n_gpus_per_node,
            c.rollout.replicas,
            parallel,
            machines.gpus_per_node,
            shared=c.gpu_sharing is not None,
        )
    except ValueError as error:
        (found.problems if t.device == "cuda" else found.warnings).append(str(error))
        return
    found.facts["gpus"] = {
        "trainer": gpus.trainer,
        "rollout": gpus.rollout,
        "shared": gpus.shared,
        "per_node": gpus.per_node,
        "nodes": gpus.nodes,
        "idle": gpus.idle,
    }
    as_gpus = "" if t.device == "cuda" else "the same on GPUs: "
    same = "of the same " if gpus.shared else ""
    found.lines.append(
        f"{as_gpus}{gpus.trainer} GPUs for the trainer ({t.nnodes} x {t.n_gpus_per_node}), {gpus.rollout} "
        f"{same}for rollouters ({c.rollout.replicas} x {parallel}): {gpus.nodes} "
        f"{'node' if gpus.nodes == 1 else 'nodes'} of {gpus.per_node}, {gpus.idle} GPUs unused"
    )
    _nodes(c, gpus, machines, found)


def _nodes(c: RunConfig, gpus: arithmetic.Gpus, machines: Machines, found: Forecast) -> None:
    """Say what the given nodes can hold; without a number, what one node fewer than needed can hold."""
    t, wanted, per_node = c.trainer, c.rollout.replicas, gpus.per_node
    nodes = machines.nodes or gpus.nodes - 1
    if not nodes:
        return
    parallel = c.rollout.engine.tensor_parallel_size
    held: int | None
    if gpus.shared:  # the engines have no GPUs of their own
        held = wanted if nodes >= gpus.nodes else None
    else:
        held = arithmetic.replicas_held(nodes, t.nnodes, t.n_gpus_per_node, parallel, per_node)
    told = arithmetic.held_told(nodes, per_node, wanted, held)
    found.lines.append(told)
    if machines.nodes is None:
        return
    found.facts["gpus"] |= {"nodes_given": nodes, "rollouters_held": held}
    if (held or 0) < wanted:
        key = "rollout.replicas" if held else "trainer.nnodes" if held is None else "trainer.n_gpus_per_node"
        change = f"use {gpus.nodes} nodes, or lower {key}"
        fatal = t.device == "cuda" and not held
        (found.problems if fatal else found.warnings).append(f"{told}; {change}")
