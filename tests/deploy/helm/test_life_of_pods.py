"""How a cluster starts pods, asks after them, replaces and ends them: what must not change unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.helm import charts
from tests.deploy.helm.objects import of_kind, pods

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
GRPC = {"grpc": {"port": 50051}}
LISTENS = {"tcpSocket": {"port": "grpc"}}


def http(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "http"}}


ASKED: list[tuple[str, str, str, dict[str, Any] | None]] = [
    # /healthz: process and engine answer, paused too. /readyz: it takes part; who does not is not killed.
    ("defaults", "rollouter", "startupProbe", http("/healthz")),
    ("defaults", "rollouter", "livenessProbe", http("/healthz")),
    ("defaults", "rollouter", "readinessProbe", http("/readyz")),
    ("defaults", "queue", "startupProbe", http("/healthz")),
    ("defaults", "queue", "livenessProbe", http("/healthz")),
    ("defaults", "queue", "readinessProbe", http("/readyz")),
    *(("defaults", "coordinator", probe, GRPC) for probe in PROBES),
    # Kubernetes' own gRPC probe speaks no TLS.
    *(("ci/tls.yaml", "coordinator", probe, LISTENS) for probe in PROBES),
    # While it loads its log a server refuses every command: that is not dead.
    ("defaults", "redis", "livenessProbe", {"tcpSocket": {"port": "redis"}}),
]


@pytest.mark.parametrize(("preset", "container", "probe", "action"), ASKED)
def test_what_a_probe_asks(preset: str, container: str, probe: str, action: dict[str, Any]) -> None:
    (found,) = [
        c for pod in pods(charts.rendered(preset)) for c in pod.spec["containers"] if c["name"] == container
    ]
    asked = {key: found[probe].get(key) for key in ("httpGet", "tcpSocket", "grpc", "exec")}
    assert {key: value for key, value in asked.items() if value} == action


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe"])
@pytest.mark.parametrize("preset", ["defaults", "ci/tls.yaml"])
def test_valkey_is_ready_when_it_answers_who_has_the_password(preset: str, probe: str) -> None:
    """valkey-cli finds it in REDISCLI_AUTH. It ends with 0 on the server's errors, too: PONG has to come."""
    (pod,) = [pod for pod in pods(charts.rendered(preset)) if pod.component == "redis"]
    (container,) = pod.spec["containers"]
    script = container[probe]["exec"]["command"][-1]
    assert script.startswith("valkey-cli -p 6379 ")
    assert script.endswith("ping | grep -q PONG")
    assert ("--cert /etc/headrace/tls/tls.crt" in script) == (preset == "ci/tls.yaml")
    assert "REDISCLI_AUTH" in {e["name"] for e in container["env"]}


def test_how_pods_are_replaced() -> None:
    """Two trainers, queue services or coordinators at once would fight; a rollouter more has no GPU."""
    found = {o["metadata"]["name"]: o["spec"]["strategy"] for o in of_kind(charts.rendered(), "Deployment")}
    recreate = {"type": "Recreate"}
    assert found == {
        "demo-rollouter": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "demo-trainer": recreate,
        "demo-queue": recreate,
        "demo-coordinator": recreate,
    }


def test_who_is_found_before_it_is_ready() -> None:
    """Nobody is asked so early."""
    early = {
        o["metadata"]["name"]: o["spec"].get("publishNotReadyAddresses", False)
        for o in of_kind(charts.rendered(), "Service")
    }
    assert early == {"demo-queue": False, "demo-coordinator": False, "demo-redis": False}


def test_how_the_trainer_and_rollouters_are_started() -> None:
    """A trainer that is done stays: what exits is started again. Both are found by the addresses of pods."""
    for pod in pods(charts.rendered()):
        if pod.component in ("trainer", "rollouter"):
            (container,) = pod.spec["containers"]
            env = {
                e["name"]: e.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
                for e in container["env"]
            }
            assert (env["POD_IP"], env["POD_NAME"]) == ("status.podIP", "metadata.name")
            if pod.component == "trainer":
                assert {"--stay", "--node-address=$(POD_IP)", "--node-name=$(POD_NAME)"} <= set(
                    container["args"]
                )
            else:
                assert env["VLLM_HOST_IP"] == "status.podIP", "else vLLM takes the first address it finds"
                assert "--replica=$(POD_NAME)" in container["args"]


def test_a_deployment_is_late_only_after_its_probe_is() -> None:
    """`rollout status` and `helm --wait` give up at the deadline."""
    for sets in ((), ("rollouter.startupProbe.failureThreshold=900", "queue.startupProbe.periodSeconds=60")):
        objects = charts.rendered(sets=sets)
        for pod in pods(objects):
            if pod.owner["kind"] == "Deployment":
                probe = pod.spec["containers"][0].get(
                    "startupProbe", {"periodSeconds": 10, "failureThreshold": 270}
                )
                starts = probe["periodSeconds"] * probe["failureThreshold"]
                assert pod.owner["spec"]["progressDeadlineSeconds"] >= starts + 600, pod.name


@pytest.mark.parametrize(
    ("nodes", "scheduler", "members"), [(3, "volcano", "3"), (3, "kai", None), (1, "", None)]
)
def test_volcano_starts_all_nodes_or_none(nodes: int, scheduler: str, members: str | None) -> None:
    """It makes a group of one pod for each workload, unless its ReplicaSet says how many: that has the
    Deployment's annotations."""
    objects = charts.rendered(
        sets=(
            f"config.trainer.nnodes={nodes}",
            f'trainer.schedulerName="{scheduler}"',
            'trainer.annotations={"mine":"1"}',
            'checkpoints.accessModes=["ReadWriteMany"]',
        )
    )
    (trainer,) = [o for o in of_kind(objects, "Deployment") if o["metadata"]["name"] == "demo-trainer"]
    found = trainer["metadata"]["annotations"]
    assert found.pop("scheduling.volcano.sh/group-min-member", None) == members
    assert found == {"mine": "1"}


def test_an_own_number_of_members_goes_first() -> None:
    key = "scheduling.volcano.sh/group-min-member"
    objects = charts.rendered(
        sets=('trainer.schedulerName="volcano"', f'trainer.annotations={{"{key}":"7"}}')
    )
    (trainer,) = [o for o in of_kind(objects, "Deployment") if o["metadata"]["name"] == "demo-trainer"]
    assert trainer["metadata"]["annotations"] == {key: "7"}


def test_a_leader_worker_set_is_no_group_of_volcanos_making() -> None:
    """Its controller makes the group, if it is told to. Annotations are its own, and those of the trainer."""
    objects = charts.rendered(
        "ci/leader-worker-set.yaml",
        sets=(
            'trainer.schedulerName="volcano"',
            'trainer.annotations={"mine":"1","both":"trainer"}',
            'trainer.leaderWorkerSet.annotations={"both":"set"}',
        ),
    )
    (group,) = of_kind(objects, "LeaderWorkerSet")
    found = group["metadata"]["annotations"]
    assert (found["mine"], found["both"]) == ("1", "set")
    assert "scheduling.volcano.sh/group-min-member" not in found
