"""The trainer as a LeaderWorkerSet: the same pods, what names them follows, and no switch while it is on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.kube_tools import HelmFailed
from tests.deploy.helm import charts, leader_worker_set, pitfalls
from tests.deploy.helm.objects import Object, pods
from tests.deploy.helm.test_upgrades import get, installed, upgrade

PRESET = "ci/leader-worker-set.yaml"
SET = 'trainer.workload="leaderWorkerSet"'


def the_set(objects: list[Object]) -> Object:
    return get(objects, "LeaderWorkerSet", "demo-trainer")


def test_its_pods_are_those_of_the_deployment() -> None:
    """Labels too: by them policies, budgets, monitors and commands find them."""
    as_set = charts.rendered(PRESET, sets=("kubernetes.enabled=false",))
    as_deployment = charts.rendered(
        PRESET,
        sets=(
            "kubernetes.enabled=false",
            'trainer.workload="deployment"',
            'trainer.leaderWorkerSet.exclusiveTopology=""',
        ),
    )
    (one,) = [pod for pod in pods(as_set) if pod.component == "trainer"]
    (two,) = [pod for pod in pods(as_deployment) if pod.component == "trainer"]
    assert (one.owner["kind"], two.owner["kind"]) == ("LeaderWorkerSet", "Deployment")
    assert (one.labels, one.spec) == (two.labels, two.spec)


def test_one_node_may_be_a_group() -> None:
    objects = charts.rendered(sets=(SET,))
    assert the_set(objects)["spec"]["leaderWorkerTemplate"]["size"] == 1
    assert list(leader_worker_set.violations(the_set(objects))) == []
    assert [problem for check in pitfalls.CHECKS for problem in check(objects)] == []


def test_the_coordinator_may_scale_it_and_knows_what_it_is() -> None:
    objects = charts.rendered(PRESET)
    assert pitfalls.run_config(objects)["kubernetes"]["trainer_kind"] == "LeaderWorkerSet"
    rights = {
        (rule["apiGroups"][0], rule["resources"][0]): rule.get("resourceNames")
        for rule in get(objects, "Role", "demo-coordinator")["rules"]
    }
    assert rights["leaderworkerset.x-k8s.io", "leaderworkersets/scale"] == ["demo-trainer"]
    assert rights["apps", "deployments"] == rights["apps", "deployments/scale"] == ["demo-rollouter"]
    other = charts.rendered("ci/everything.yaml")
    assert "trainer_kind" not in pitfalls.run_config(other)["kubernetes"]
    assert get(other, "Role", "demo-coordinator")["rules"][1]["resourceNames"] == [
        "demo-rollouter",
        "demo-trainer",
    ]


def test_labels_and_placement_are_those_of_the_set() -> None:
    found = the_set(charts.rendered(PRESET))["metadata"]
    assert found["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert found["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "topology.example.com/rack"
    }
    assert "annotations" not in the_set(charts.rendered(sets=(SET,)))["metadata"]


def test_placement_without_a_set_is_refused() -> None:
    with pytest.raises(HelmFailed, match="a Deployment has no such thing"):
        charts.text(sets=('trainer.leaderWorkerSet.exclusiveTopology="rack"',))


def test_the_notes_name_a_pod_that_is_there() -> None:
    assert "exec pod/demo-trainer-0 -- headrace status /runs/demo" in charts.notes(PRESET)
    assert "exec deployment/demo-trainer -- headrace status /runs/demo" in charts.notes()


# -- a switch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begun", "switch", "kind"),
    [((), (SET,), "deployment"), ((SET,), (), "leaderworkerset")],
    ids=["to the set", "from the set"],
)
def test_a_trainer_that_is_on_does_not_change_its_workload(
    begun: tuple[str, ...], switch: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    before = installed(begun)
    assert upgrade(before, tmp_path, *begun), "no switch"
    with pytest.raises(HelmFailed) as refused:
        upgrade(before, tmp_path, *switch)
    assert f"kubectl -n tests scale {kind}/demo-trainer --replicas=0" in str(refused.value)
    (trainer,) = [pod.owner for pod in pods(before) if pod.component == "trainer"]
    trainer["spec"]["replicas"] = 0
    after = upgrade(before, tmp_path, *switch)
    assert [pod.owner["kind"] for pod in pods(after) if pod.component == "trainer"] != [trainer["kind"]]


def test_a_cluster_without_the_api_can_have_a_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup of a kind that the API does not know would be an error."""
    from tests.deploy.helm import cluster

    monkeypatch.delitem(cluster._KINDS, leader_worker_set.API_VERSION)
    before = installed()
    trainer = get(upgrade(before, tmp_path), "Deployment", "demo-trainer")
    assert trainer["spec"]["replicas"] == 1


# -- the check of its shape ---------------------------------------------------------------------------

BROKEN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda s: s.update(strategy={"type": "Recreate"}), "spec: no key strategy"),
    (lambda s: s.update(replicas="1"), "spec.replicas: '1' is of another type"),
    (lambda s: s.update(startupPolicy="Now"), "'Now' is none of LeaderCreated, LeaderReady"),
    (lambda s: s.update(leaderWorkerTemplate=[]), "is no map"),
    (lambda s: s["leaderWorkerTemplate"].update(template={}), "no key template"),
    (lambda s: s["leaderWorkerTemplate"].update(restartPolicy="Always"), "'Always' is none of None"),
    (lambda s: s["leaderWorkerTemplate"].update(size=0), "a group has one pod or more"),
    (lambda s: s["leaderWorkerTemplate"].pop("workerTemplate"), "workerTemplate is missing"),
    (
        lambda s: s["rolloutStrategy"]["rollingUpdateConfiguration"].update(maxUnavailable=0),
        "nothing could be updated",
    ),
]


@pytest.mark.parametrize(("break_it", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_wrong_shape_is_told(break_it: Callable[[dict[str, Any]], Any], message: str) -> None:
    found = copy.deepcopy(the_set(charts.rendered(PRESET)))
    break_it(found["spec"])
    assert any(message in problem for problem in leader_worker_set.violations(found))
