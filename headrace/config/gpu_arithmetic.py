"""Compute how many GPUs and nodes a run needs and how evenly mini-batches divide among ranks. Pure functions.

The recipe counts nodes for two pools. With t trainer GPUs and r rollout GPUs per node, and g GPUs in a node:

    t + r <= g:  the pools share nodes,  max(trainer nodes, rollout nodes)
    t + r >  g:  they do not,            trainer nodes + rollout nodes

Here each rollouter is an independent replica that needs `tensor_parallel_size` GPUs on any one node.
`nodes_needed` packs replicas onto the GPUs that the trainer leaves free, then onto further nodes. The result
never exceeds the recipe's and equals it for the recipe's layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def nodes_needed(
    trainer_nodes: int, trainer_gpus: int, replicas: int, tensor_parallel: int, gpus_per_node: int
) -> int:
    """Return the fewest nodes for `trainer_gpus` ranks on each of `trainer_nodes` and all replicas, unsplit.

    Raises ValueError if a trainer node's ranks or a replica do not fit on one node.
    """
    if trainer_gpus > gpus_per_node:
        raise ValueError(
            f"trainer.n_gpus_per_node = {trainer_gpus}, but a node has {gpus_per_node} GPUs: lower it and "
            "raise trainer.nnodes"
        )
    if tensor_parallel > gpus_per_node:
        raise ValueError(
            f"rollout.engine.tensor_parallel_size = {tensor_parallel}, but a node has {gpus_per_node} GPUs, "
            "and an engine does not span nodes: lower it"
        )
    beside_the_trainer = trainer_nodes * ((gpus_per_node - trainer_gpus) // tensor_parallel)
    rest = max(0, replicas - beside_the_trainer)
    per_node = gpus_per_node // tensor_parallel
    return trainer_nodes + -(-rest // per_node)


CONTEXTS_SHARE = 0.05
"""Rough share of a GPU that two processes need on top of their allocations (contexts, collectives)."""
LEAST_TRAINER_SHARE = 0.1


@dataclass(frozen=True)
class Sharing:
    """How the memory of one GPU is divided when trainer and engines share it, as in colocated sync."""

    engines: int
    """Largest number of engines on one GPU."""
    engine_share: float
    """Memory share of each engine: rollout.engine.gpu_memory_utilization."""

    @property
    def trainer_share(self) -> float:
        """Return the share left for a rank; negative if the engines alone take too much."""
        return 1.0 - CONTEXTS_SHARE - self.engines * self.engine_share

    @property
    def largest_engine_share(self) -> float:
        """Return the largest engine share that leaves a rank LEAST_TRAINER_SHARE, rounded to hundredths."""
        return int(100 * (1.0 - CONTEXTS_SHARE - LEAST_TRAINER_SHARE) / self.engines + 1e-9) / 100

    @property
    def fits(self) -> bool:
        return self.trainer_share >= LEAST_TRAINER_SHARE - 1e-9


def sharing(ranks: int, replicas: int, tensor_parallel: int, engine_share: float) -> Sharing:
    """Return the sharing with engines spread evenly over the GPUs of `ranks`."""
    return Sharing(max(1, -(-replicas * tensor_parallel // ranks)), engine_share)


def replicas_held(
    nodes: int, trainer_nodes: int, trainer_gpus: int, tensor_parallel: int, gpus_per_node: int
) -> int | None:
    """Return the most replicas that fit on `nodes` along with the trainer; None if the trainer does not fit.

    As in `nodes_needed`, each trainer node is a separate node. The caller must have checked that a trainer
    node's ranks and a replica each fit on one node.
    """
    if nodes < trainer_nodes:
        return None
    beside_the_trainer = trainer_nodes * ((gpus_per_node - trainer_gpus) // tensor_parallel)
    return beside_the_trainer + (nodes - trainer_nodes) * (gpus_per_node // tensor_parallel)


def held_told(nodes: int, gpus_per_node: int, replicas: int, held: int | None) -> str:
    """Say in a sentence how much of a run `nodes` can hold. `held`: the result of `replicas_held`."""
    node = "1 node" if nodes == 1 else f"{nodes} nodes"
    if held is None:
        return (
            f"{node} of {gpus_per_node} cannot hold the trainer: it stays pending, and the rollouters with it"
        )
    if held == 0 and replicas:
        return f"{node} of {gpus_per_node} can hold the trainer and no rollouter: nothing is generated"
    told = f"{node} of {gpus_per_node} can hold the trainer and {held} rollouter{'s'[: held != 1]}"
    if held < replicas:
        told += f": {replicas - held} of {replicas} stay pending, and the run goes on without them"
    return told


@dataclass(frozen=True)
class Gpus:
    """The resources that a run requests from a cluster."""

    trainer: int
    rollout: int
    per_node: int
    nodes: int
    shared: bool = False
    """Whether the engines use the trainer's GPUs."""

    @property
    def total(self) -> int:
        return self.trainer if self.shared else self.trainer + self.rollout

    @property
    def idle(self) -> int:
        """Return the number of unused GPUs on those nodes."""
        return self.nodes * self.per_node - self.total


def gpus(
    trainer_nodes: int,
    trainer_gpus: int,
    replicas: int,
    tensor_parallel: int,
    gpus_per_node: int,
    *,
    shared: bool = False,
) -> Gpus:
    """`shared`: engines use the trainer's GPUs and need no others. Raises what `nodes_needed` raises."""
    beside = 0 if shared else replicas
    return Gpus(
        trainer=trainer_nodes * trainer_gpus,
        rollout=replicas * tensor_parallel,
        per_node=gpus_per_node,
        nodes=nodes_needed(trainer_nodes, trainer_gpus, beside, tensor_parallel, gpus_per_node),
        shared=shared,
    )


def samples_per_rank(mini_batch: int, ranks: int) -> tuple[int, int]:
    """Return the (fewest, most) samples of a mini-batch on one rank, assuming equal lengths."""
    return mini_batch // ranks, -(-mini_batch // ranks)


def uneven_share(mini_batch: int, ranks: int) -> float:
    """Return the share of rank time, 0 to 1, that an uneven mini-batch wastes, assuming equal lengths."""
    return 1.0 - mini_batch / (ranks * samples_per_rank(mini_batch, ranks)[1])


@dataclass(frozen=True)
class BatchPlan:
    """How a run's samples divide into updates."""

    samples: int
    """rollout.total_rollout_steps."""
    per_update: int
    """R x M: samples per claim."""
    mini_batch: int
    """M: samples per optimizer step."""
    ranks: int

    @property
    def whole_updates(self) -> int:
        return self.samples // self.per_update

    @property
    def rest(self) -> int:
        """Return the samples of a last, shorter update; 0 if there is none."""
        return self.samples % self.per_update


def batch_notes(b: BatchPlan) -> Iterator[str]:
    """Yield what is allowed but wasteful about the batches, each with its fix."""
    if b.mini_batch % b.ranks:
        fewest, most = samples_per_rank(b.mini_batch, b.ranks)
        lower, upper = b.mini_batch - b.mini_batch % b.ranks, b.mini_batch + -b.mini_batch % b.ranks
        better = f"{lower} or {upper}" if lower else f"{upper}"
        yield (
            f"actor.ppo_mini_batch_size = {b.mini_batch} does not divide by {b.ranks} trainer ranks: some "
            f"get {most} samples and others {fewest}, and "
            f"{100 * uneven_share(b.mini_batch, b.ranks):.0f} % of their time is spent waiting; "
            f"set it to {better}"
        )
    if b.rest:
        yield (
            f"rollout.total_rollout_steps = {b.samples} leaves {b.rest} samples over {b.per_update}-sample "
            f"updates: the last update is shorter (or left out, with data.drop_last); set it to "
            f"{b.samples - b.rest} or {b.samples - b.rest + b.per_update}"
        )
