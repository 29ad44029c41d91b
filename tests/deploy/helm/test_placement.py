"""Whatever order pods come in, the trainer gets its GPUs: the chart's pods on the default scheduler's rules.

Each trial has a seed of its own, which says in which order pods are placed, which of equal nodes is taken,
whether nodes have zones, which of them have the images, and which version of the scheduler scores them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deploy.helm import charts, objects
from tests.deploy.helm.pitfalls import quantity
from tests.deploy.helm.scheduler import Node, Pod, Queue, Scheduler
from tests.deploy.helm.test_presets import requested

SEEDS = range(12)
INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


@dataclass(frozen=True)
class Shape:
    nodes: tuple[int, ...]
    """GPUs of each."""
    trainer: tuple[int, int]
    """Its nodes, and GPUs on each."""
    rollouters: tuple[int, int]
    """How many, and GPUs of each."""

    def __str__(self) -> str:
        (nnodes, ranks), (count, tp) = self.trainer, self.rollouters
        return f"{nnodes}x{ranks} and {count}x{tp} on {'+'.join(map(str, self.nodes))}"


EIGHTS, FOURS = (8,) * 2, (4,) * 3
ONE_NODE = [
    Shape(EIGHTS, (1, 8), (8, 1)),
    Shape(EIGHTS, (1, 8), (2, 4)),
    Shape(EIGHTS, (1, 8), (1, 8)),
    Shape(EIGHTS, (1, 6), (10, 1)),
    Shape(EIGHTS, (1, 4), (3, 4)),
    Shape((8,), (1, 6), (2, 1)),
    Shape(FOURS, (1, 4), (8, 1)),
    Shape((8, 4), (1, 8), (4, 1)),
    Shape((8, 4, 4, 2), (1, 8), (10, 1)),
]
WHOLE_NODES = [
    Shape((8,) * 4, (2, 8), (4, 4)),
    Shape((8,) * 5, (3, 8), (16, 1)),
    Shape((8,) * 5, (3, 8), (5, 2)),
    Shape((4,) * 5, (2, 4), (6, 2)),
    Shape((8,) * 16, (8, 8), (64, 1)),
]
"""A trainer that takes all GPUs of its nodes, on nodes of one size."""
SHARED_NODES = [
    Shape((8,) * 3, (3, 6), (6, 1)),
    Shape((8,) * 4, (4, 6), (8, 1)),
    Shape((8, 8, 4), (2, 8), (4, 1)),
]
"""A trainer of several nodes that leaves GPUs on them to rollouters, or nodes of several sizes."""


@cache
def templates(workload: str = "deployment", nnodes: int = 1) -> dict[str, objects.Pod]:
    sets = (
        f'trainer.workload="{workload}"',
        f"config.trainer.nnodes={nnodes}",
        'checkpoints.accessModes=["ReadWriteMany"]',
    )
    return {pod.component: pod for pod in objects.pods(charts.rendered(sets=sets))}


def made(template: objects.Pod, name: str, gpus: int) -> Pod:
    needs = {what: requested(template.spec, what) for what in ("cpu", "memory")}
    return Pod(
        name=name,
        labels={**template.labels, INDEX: name.rpartition("-")[2]},
        selector=template.labels,
        needs={**needs, "gpu": float(gpus)},
        affinity=template.spec.get("affinity", {}),
        spread=template.spec.get("topologySpreadConstraints", ()),
        image=template.component,
    )


def pods_of(shape: Shape, workload: str = "deployment", heavy: bool = False) -> tuple[list[Pod], list[Pod]]:
    """Trainer and rollouters, in the order of their creation. `heavy`: they take most of the cores and memory
    that come with their GPUs, so that full nodes score low."""
    nnodes, ranks = shape.trainer
    count, tp = shape.rollouters
    found = templates(workload, nnodes if workload != "deployment" else 1)
    trainer = [made(found["trainer"], f"trainer-{n}", ranks) for n in range(nnodes)]
    rollouters = [made(found["rollouter"], f"rollouter-{n}", tp) for n in range(count)]
    if heavy:
        for pod in (*trainer, *rollouters):
            gpus = pod.needs["gpu"]
            pod.needs = {"cpu": 11 * gpus, "memory": 120 * 2**30 * gpus, "gpu": gpus}
    return trainer, rollouters


class Cluster:
    def __init__(self, nodes: Sequence[int], seed: int) -> None:
        self.chance = random.Random(seed)
        zones, warm = self.chance.random() < 0.5, self.chance.random() < 0.5
        self.nodes = [
            Node(
                name=f"node-{n}",
                holds={"cpu": 12.0 * gpus, "memory": 128.0 * 2**30 * gpus, "gpu": float(gpus)},
                zone=f"zone-{n % 2}" if zones else "",
                images=frozenset({"rollouter", "trainer"} if warm and self.chance.random() < 0.5 else ()),
            )
            for n, gpus in enumerate(nodes)
        ]
        self.scheduler = Scheduler(self.nodes, self.chance, newer=self.chance.random() < 0.5)

    def settle(self, pods: Sequence[Pod], patient: bool = False) -> list[str]:
        """Names of what stays pending."""
        mixed = list(pods)
        if not patient:
            self.chance.shuffle(mixed)
        self.pending = Queue(self.scheduler, patient).settle(mixed)
        return sorted(pod.name for pod in self.pending)

    def lose(self, gone: Callable[[Pod], bool]) -> list[Pod]:
        """The pods of that kind end; their successors, which are the same."""
        found = [pod for node in self.nodes for pod in node.pods if gone(pod)]
        for node in self.nodes:
            node.pods[:] = [pod for pod in node.pods if pod not in found]
        return [replace(pod) for pod in found]


def alone(pods: list[Pod]) -> list[Pod]:
    """Without the chart's placement."""
    return [replace(pod, affinity={}, spread=()) for pod in pods]


def trainers(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("trainer")]


# -- the fault ----------------------------------------------------------------------------------------


def test_left_to_itself_the_scheduler_deadlocks() -> None:
    """As on a real cluster: eight rollouters lie 4 + 4 on two nodes in most installations."""
    shape = ONE_NODE[0]
    stuck = 0
    for seed in SEEDS:
        trainer, rollouters = pods_of(shape)
        cluster = Cluster(shape.nodes, seed)
        left = cluster.settle(alone([*rollouters, *trainer]))
        stuck += left == ["trainer-0"]
        if left and len({node.images for node in cluster.nodes}) == 1:
            assert all(len(node.pods) == 4 for node in cluster.nodes)
    assert len(SEEDS) / 2 < stuck < len(SEEDS), "chance has it"


@pytest.mark.parametrize(
    "shape", [ONE_NODE[0], ONE_NODE[3], *ONE_NODE[6:], *WHOLE_NODES, SHARED_NODES[2]], ids=str
)
def test_it_does_on_any_shape_with_rollouters_first(shape: Shape) -> None:
    left: list[str] = []
    for seed in SEEDS[:4]:
        trainer, rollouters = pods_of(shape)
        left += trainers(Cluster(shape.nodes, seed).settle(alone([*rollouters, *trainer]), patient=True))
    assert left


# -- the chart's placement ----------------------------------------------------------------------------


@pytest.mark.parametrize("patient", [True, False], ids=["as they come", "in any order"])
@pytest.mark.parametrize("shape", [*ONE_NODE, *WHOLE_NODES], ids=str)
def test_everything_gets_its_room(shape: Shape, patient: bool) -> None:
    for seed in SEEDS if len(shape.nodes) < 10 else SEEDS[:3]:
        trainer, rollouters = pods_of(shape)
        assert Cluster(shape.nodes, seed).settle([*rollouters, *trainer], patient) == [], f"seed {seed}"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_trainer_on_one_node_always_does(data: st.DataObject) -> None:
    """On nodes of any sizes, with more rollouters than there is room for, now and after each restart."""
    nodes = data.draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=6), label="nodes")
    ranks = data.draw(st.integers(1, max(nodes)), label="trainer")
    tp = data.draw(st.sampled_from([1, 2, 4, 8]), label="tensor parallel")
    count = data.draw(st.integers(0, 2 + sum(nodes) // tp), label="rollouters")
    cluster = Cluster(nodes, data.draw(st.integers(0, 2**16), label="seed"))
    shape = Shape(tuple(nodes), (1, ranks), (count, tp))
    trainer, rollouters = pods_of(shape)
    assert trainers(cluster.settle([*rollouters, *trainer])) == []
    for _ in range(3):
        rate = data.draw(st.sampled_from([0.0, 0.3, 1.0]), label="rollouters restarted")
        lost = cluster.lose(lambda pod: pod.image == "trainer" or cluster.chance.random() < rate)  # noqa: B023
        homeless = [pod for pod in cluster.pending + lost if pod.image != "trainer"]
        assert len(cluster.settle(homeless)) == len(homeless), "none is placed while there is no trainer"
        assert trainers(cluster.settle([*homeless, *lost_trainer(lost)])) == []


def lost_trainer(lost: list[Pod]) -> list[Pod]:
    return [pod for pod in lost if pod.image == "trainer"]


@pytest.mark.parametrize("heavy", [False, True], ids=["light", "heavy"])
@pytest.mark.parametrize("shape", WHOLE_NODES, ids=str)
def test_a_trainer_of_whole_nodes_does_whenever_its_pods_come(shape: Shape, heavy: bool) -> None:
    """The worst order: all rollouters are placed between its first pod and the others. And all of it again,
    when they are restarted together."""
    for seed in SEEDS if len(shape.nodes) < 10 else SEEDS[:3]:
        trainer, rollouters = pods_of(shape, heavy=heavy)
        cluster = Cluster(shape.nodes, seed)
        for _ in range(3):
            assert cluster.settle([trainer[0], *rollouters]) == []
            assert cluster.settle(trainer[1:]) == [], f"seed {seed}"
            rate = cluster.chance.choice([0.0, 0.3, 1.0])
            lost = cluster.lose(lambda pod: pod.image == "trainer" or cluster.chance.random() < rate)  # noqa: B023
            trainer = lost_trainer(lost)
            rollouters = [pod for pod in lost if pod.image != "trainer"]


HOW = ("deployment", "leaderWorkerSet", "priority")


def pods_how(shape: Shape, how: str) -> tuple[list[Pod], list[Pod]]:
    """Trainer and rollouters of a workload, or of a Deployment whose trainer has priority."""
    trainer, rollouters = pods_of(shape, "deployment" if how == "priority" else how)
    return [replace(pod, priority=1000 * (how == "priority")) for pod in trainer], rollouters


@pytest.mark.parametrize("shape", SHARED_NODES, ids=str)
def test_what_it_does_not_do_and_what_does(shape: Shape) -> None:
    """In that order, for the other trainers of several nodes; docs/kubernetes.md says so."""
    left: dict[str, list[str]] = {how: [] for how in HOW}
    for seed in SEEDS:
        for how, stuck in left.items():
            trainer, rollouters = pods_how(shape, how)
            cluster = Cluster(shape.nodes, seed)
            cluster.settle([trainer[0], *rollouters])
            stuck += trainers(cluster.settle([*trainer[1:], *cluster.pending]))
    assert left["deployment"]
    assert left["leaderWorkerSet"] == left["priority"] == []


def test_rollouters_too_many_may_take_the_place_of_a_pod_that_is_replaced() -> None:
    """Where the trainer is a Deployment of several nodes without priority; docs/kubernetes.md says so."""
    left: dict[str, list[str]] = {how: [] for how in HOW}
    for seed in SEEDS:
        for how, stuck in left.items():
            cluster = Cluster((8,) * 3, seed)
            trainer, rollouters = pods_how(Shape((8,) * 3, (2, 8), (12, 1)), how)
            assert cluster.settle(trainer) == []
            assert len(cluster.settle(rollouters)) == 4
            lost = cluster.lose(lambda pod: pod.name == "trainer-1")
            stuck += trainers(cluster.settle([*lost, *cluster.pending]))
    assert left["deployment"]
    assert left["leaderWorkerSet"] == left["priority"] == []


@pytest.mark.parametrize(
    ("preset", "nodes"),
    [("examples/one-node-8-gpus.yaml", 1), ("examples/two-nodes.yaml", 2), ("examples/128-gpus.yaml", 16)],
)
def test_the_examples_fit_as_they_are(preset: str, nodes: int) -> None:
    """With all that they ask for, the services beside them; on nodes of 128 cores and 2 TiB."""
    found = [pod for pod in objects.pods(charts.rendered(preset)) if pod.owner["kind"] != "Pod"]
    for seed in SEEDS[:3]:
        cluster = Cluster((8,) * nodes, seed)
        for node in cluster.nodes:
            node.holds = {"cpu": 128.0, "memory": 2.0**41, "gpu": 8.0}
        pods = [
            made(
                pod,
                f"{pod.component}-{n}",
                sum(
                    int(quantity(c["resources"]["limits"].get("nvidia.com/gpu", 0)) or 0)
                    for c in pod.containers
                ),
            )
            for pod in found
            for n in range(pod.owner["spec"]["replicas"])
        ]
        assert cluster.settle(pods) == [], f"seed {seed}"


# -- values of one's own ------------------------------------------------------------------------------


def rollouter(*sets: str, preset: str = charts.DEFAULTS) -> objects.Pod:
    (found,) = [p for p in objects.pods(charts.rendered(preset, sets=sets)) if p.component == "rollouter"]
    return found


def test_other_affinities_of_ones_own_stand_beside_it() -> None:
    near = '{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[]}}}'
    found = rollouter(f"rollouter.affinity={near}").spec
    assert set(found["affinity"]) == {"nodeAffinity", "podAffinity"}
    assert found["topologySpreadConstraints"][0]["labelSelector"] == {
        "matchLabels": {"headrace/spread": "none"}
    }


def test_a_pod_affinity_of_ones_own_is_all_there_is() -> None:
    own: dict[str, list[Any]] = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    found = rollouter(
        'rollouter.affinity={"podAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[]}}'
    )
    assert found.spec["affinity"] == {"podAffinity": own}
    assert "topologySpreadConstraints" not in found.spec
    assert rollouter('rollouter.affinity={"podAffinity":{}}').spec["affinity"] == {"podAffinity": {}}


def test_constraints_of_ones_own_replace_the_charts() -> None:
    found = rollouter(preset="ci/everything.yaml").spec["topologySpreadConstraints"]
    assert found[0]["labelSelector"] == {"matchLabels": {"app.kubernetes.io/component": "rollouter"}}


def test_on_cpus_there_is_none_of_it() -> None:
    found = rollouter(preset="ci/demo-cpu.yaml").spec
    assert "affinity" not in found
    assert "topologySpreadConstraints" not in found
