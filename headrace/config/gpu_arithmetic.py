"""How many GPUs and nodes a run needs, and how evenly a mini-batch falls on the ranks. Pure functions.

The recipe counts nodes from two pools of equal shape per node: with t and r GPUs per node of trainer and
rollout, and g GPUs in a node,

    t + r <= g:  both pools share nodes, max(trainer nodes, rollout nodes) are needed
    t + r >  g:  they do not,            trainer nodes + rollout nodes

Here a rollouter is a replica of its own that needs `tensor_parallel_size` GPUs of one node, wherever there
are some: `nodes_needed` packs them onto what the trainer leaves free, then onto further nodes. That is never
more nodes than the recipe's rule asks for, and the same for its layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def nodes_needed(
    trainer_nodes: int, trainer_gpus: int, replicas: int, tensor_parallel: int, gpus_per_node: int
) -> int:
    """The fewest nodes that hold `trainer_gpus` ranks on each of `trainer_nodes`, and every replica whole.

    Raises ValueError when a trainer node's ranks or a replica do not fit on one node.
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
"""Of a GPU: what two processes on it need beside what they allocate (contexts, collectives), roughly."""
LEAST_TRAINER_SHARE = 0.1


@dataclass(frozen=True)
class Sharing:
    """Trainer and engines on the same GPUs, as in colocated sync: how the memory of one is divided."""

    engines: int
    """Most engines that have a part of one GPU."""
    engine_share: float
    """Of each of them: rollout.engine.gpu_memory_utilization."""

    @property
    def trainer_share(self) -> float:
        """What is left for a rank; below 0 when the engines alone are too many."""
        return 1.0 - CONTEXTS_SHARE - self.engines * self.engine_share

    @property
    def largest_engine_share(self) -> float:
        """The largest share of an engine that leaves a rank LEAST_TRAINER_SHARE, in hundredths."""
        return int(100 * (1.0 - CONTEXTS_SHARE - LEAST_TRAINER_SHARE) / self.engines + 1e-9) / 100

    @property
    def fits(self) -> bool:
        return self.trainer_share >= LEAST_TRAINER_SHARE - 1e-9


def sharing(ranks: int, replicas: int, tensor_parallel: int, engine_share: float) -> Sharing:
    """Engines are spread evenly over the GPUs of `ranks`."""
    return Sharing(max(1, -(-replicas * tensor_parallel // ranks)), engine_share)


def replicas_held(
    nodes: int, trainer_nodes: int, trainer_gpus: int, tensor_parallel: int, gpus_per_node: int
) -> int | None:
    """The most replicas that `nodes` hold beside the trainer; None where they do not hold the trainer.

    As in `nodes_needed`, each of the trainer's nodes is one of its own, and what fits on a node at all is the
    caller's to have checked.
    """
    if nodes < trainer_nodes:
        return None
    beside_the_trainer = trainer_nodes * ((gpus_per_node - trainer_gpus) // tensor_parallel)
    return beside_the_trainer + (nodes - trainer_nodes) * (gpus_per_node // tensor_parallel)


def held_told(nodes: int, gpus_per_node: int, replicas: int, held: int | None) -> str:
    """What `nodes` hold of a run with so many replicas, in a sentence; `held` is of `replicas_held`."""
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
    """What a run asks a cluster for."""

    trainer: int
    rollout: int
    per_node: int
    nodes: int
    shared: bool = False
    """Whether the engines are on the trainer's GPUs."""

    @property
    def total(self) -> int:
        return self.trainer if self.shared else self.trainer + self.rollout

    @property
    def idle(self) -> int:
        """GPUs of those nodes that nobody uses."""
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
    """`shared`: engines are on the trainer's GPUs and need none of their own. Raises as `nodes_needed`."""
    beside = 0 if shared else replicas
    return Gpus(
        trainer=trainer_nodes * trainer_gpus,
        rollout=replicas * tensor_parallel,
        per_node=gpus_per_node,
        nodes=nodes_needed(trainer_nodes, trainer_gpus, beside, tensor_parallel, gpus_per_node),
        shared=shared,
    )


def samples_per_rank(mini_batch: int, ranks: int) -> tuple[int, int]:
    """(fewest, most) samples of a mini-batch on one rank when all are of one length."""
    return mini_batch // ranks, -(-mini_batch // ranks)


def uneven_share(mini_batch: int, ranks: int) -> float:
    """The share of the ranks' time that an uneven mini-batch leaves unused, 0 to 1; lengths being equal."""
    return 1.0 - mini_batch / (ranks * samples_per_rank(mini_batch, ranks)[1])


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of a run fall into updates."""

    samples: int
    """rollout.total_rollout_steps."""
    per_update: int
    """R x M: what one claim takes."""
    mini_batch: int
    """M: one optimizer step."""
    ranks: int

    @property
    def whole_updates(self) -> int:
        return self.samples // self.per_update

    @property
    def rest(self) -> int:
        """Samples of a last, shorter update; 0 when there is none."""
        return self.samples % self.per_update


def batch_notes(b: BatchPlan) -> Iterator[str]:
    """What about the batches is allowed but wasteful, each with the change that mends it."""
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
