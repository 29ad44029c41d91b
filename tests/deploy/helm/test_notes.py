"""What an installation prints: how many GPUs and nodes, what to look out for, what to type next."""

from __future__ import annotations

import re

import pytest

from tests.deploy.helm import charts
from tests.deploy.helm.test_flows import TABLE

SHARED = ("config.trainer.nnodes=2", 'checkpoints.accessModes=["ReadWriteMany"]')


def numbers(text: str) -> tuple[int, ...]:
    """GPUs of trainer and rollouters, both together, and nodes."""
    found = re.search(
        r"trainer +\d+ x \d+ = (\d+)\n +rollouters +\d+ x \d+ = (\d+)\n +together +(\d+)\n +nodes +(\d+)",
        text,
    )
    assert found, text
    return tuple(int(n) for n in found.groups())


@pytest.mark.parametrize(
    ("preset", "sets", "expected"),
    [
        ("examples/one-node-8-gpus.yaml", (), (6, 2, 8, 1)),
        ("examples/two-nodes.yaml", (), (8, 8, 16, 2)),
        ("examples/128-gpus.yaml", (), (64, 64, 128, 16)),
        # Two engines of two GPUs beside each of three trainer nodes, one on a further node.
        (
            "defaults",
            (
                'config.rollout={"replicas":7,"engine":{"tensor_parallel_size":2}}',
                'config.trainer={"nnodes":3,"n_gpus_per_node":4}',
                'checkpoints.accessModes=["ReadWriteMany"]',
            ),
            (12, 14, 26, 4),
        ),
        # Two GPUs are left on the trainer's node, too few for an engine of four: two more nodes for three.
        (
            "defaults",
            ('config={"rollout":{"replicas":3,"engine":{"tensor_parallel_size":4}}}',),
            (6, 12, 18, 3),
        ),
        ("defaults", ("rollouter.replicas=0",), (6, 0, 6, 1)),
        ("ci/keda.yaml", (), (6, 2, 8, 1)),
    ],
)
def test_gpu_arithmetic(preset: str, sets: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert numbers(charts.notes(preset, sets)) == expected


def test_shared_gpus_are_counted_once() -> None:
    text = charts.notes("examples/colocated-8-gpus.yaml")
    assert "rollouters 8 x 1 = 8, the same GPUs" in text
    assert "nodes      1 with 8 GPUs each" in text
    assert "offer nvidia.com/gpu.shared at least" in text
    assert "exec deployment/demo-trainer -- nvidia-smi -L" in text
    assert "together" not in text


def test_how_to_get_the_timeline() -> None:
    command = "exec deployment/demo-trainer -- headrace trace /runs/demo --out - > trace.json"
    assert command in charts.notes(sets=("config.trace.enable=true",))
    assert "headrace trace" not in charts.notes()


def test_what_fewer_nodes_hold() -> None:
    text = charts.notes("examples/two-nodes.yaml")
    assert "fewer      1 can hold the trainer and no rollouter: nothing is generated" in text
    text = charts.notes("examples/128-gpus.yaml")
    assert "fewer      15 can hold the trainer and 56 rollouters: 8 stay pending" in text
    assert "fewer  " not in charts.notes("examples/one-node-8-gpus.yaml")
    assert "fewer      1 can hold no trainer of this size" in charts.notes(sets=SHARED)


def test_how_pods_are_placed() -> None:
    told = "Rollouters stay pending until {} has a node."
    assert told.format("the trainer") in charts.notes("examples/two-nodes.yaml")
    assert told.format("the trainer's first pod") in charts.notes("examples/128-gpus.yaml")
    assert told.format("each pod of the trainer") in charts.notes("ci/leader-worker-set.yaml")
    assert "stay pending until" not in charts.notes(sets=('rollouter.affinity={"podAffinity":{}}',))


@pytest.mark.parametrize(
    ("sets", "warned"),
    [
        ((), True),
        (("config.trainer.n_gpus_per_node=8", "config.actor.ppo_mini_batch_size=64"), True),
        (('trainer.priorityClassName="training"',), False),
        (('trainer.schedulerName="volcano"',), True),
        (('trainer.workload="leaderWorkerSet"',), False),
    ],
    ids=["shared nodes", "whole nodes", "priority", "gang", "set"],
)
def test_a_trainer_that_may_lose_the_race_for_its_nodes(sets: tuple[str, ...], warned: bool) -> None:
    assert ("can take what the last of them needs" in charts.notes(sets=(*SHARED, *sets))) == warned


def test_cpus_have_none() -> None:
    text = charts.notes("ci/demo-cpu.yaml")
    assert "No GPUs: trainer.device is cpu" in text
    assert "--timeout 10m" in text
    assert "WARNING" not in text


def test_warnings() -> None:
    text = charts.notes(sets=("config.actor.ppo_mini_batch_size=50",))
    assert "ppo_mini_batch_size 50 does not divide by the trainer's 6 ranks" in text
    assert "54 would fit" in text
    assert "no checkpoint before the end" in text
    assert "WARNING" not in charts.notes("examples/128-gpus.yaml")


def test_an_autoscaler_that_nobody_tells_anything() -> None:
    on = ("autoscaling.enabled=true", "kubernetes.enabled=true")
    text = charts.notes("examples/128-gpus.yaml", (*on, "monitoring.podMonitors.enabled=false"))
    assert (
        "WARNING: autoscaling asks the Prometheus at http://prometheus-operated.monitoring.svc:9090" in text
    )
    assert "set monitoring.podMonitors.enabled" in text
    assert "WARNING" not in charts.notes("examples/128-gpus.yaml", on)
    own = (*on, "monitoring.podMonitors.enabled=false", 'autoscaling.query="vector(1)"')
    assert "WARNING" not in charts.notes("examples/128-gpus.yaml", own)


def test_how_long_a_trainer_has_to_stop() -> None:
    """More than that, and it goes on from the checkpoint before: the way to raise it stands beside."""
    assert "the trainer has 120 s to end an update and write a checkpoint" in charts.notes()
    text = charts.notes(sets=('config.services={"stop_timeout_s":300}',))
    assert "the trainer has 360 s to end" in text
    assert "trainer.terminationGracePeriodSeconds" in text


def test_how_to_go_on() -> None:
    text = charts.notes()
    assert "--timeout 50m" in text
    assert f"service/demo-queue 8000:{TABLE['ports']['queue']['http']}" in text
    assert "kubectl -n tests scale deployment/demo-rollouter --replicas=N" in text
    assert "delete pvc demo-checkpoints" in text
    assert "delete pvc data-demo-redis-0" in text
    assert "monitoring.dashboards.enabled" in text
    assert "The next upgrade sets 3 again" in charts.notes(sets=("rollouter.replicas=3",))
    assert "KEDA keeps between 2 and 12" in charts.notes("ci/keda.yaml")
    assert "headrace:{demo}:*" in charts.notes("ci/external-redis.yaml")
    assert "delete pvc" not in charts.notes(
        sets=("checkpoints.retain=false", "redis.persistence.retain=false")
    )
