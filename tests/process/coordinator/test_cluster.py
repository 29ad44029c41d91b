"""The coordinator in a cluster: the real process and client, on a stateful fake of the Kubernetes API."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.kubernetes import KubernetesConfig
from headrace.ledger import ops
from headrace.local.valkey_server import ValkeyServer, start_valkey
from headrace.service import recommendation, telemetry
from headrace.service.telemetry import RolloutTelemetry
from headrace_coordinator.kube.api import DELETION_COST, Cluster, ClusterError
from scripts.kube_tools import kubectl
from tests.kube_api import NAMESPACE, KubeApi
from tests.support.coordinator_peers import Member, Trainer
from tests.support.coordinator_process import PASSWORD, Coordinator, until

A, B, NEW = "roll-5d-aaaaa", "roll-5d-bbbbb", "roll-5d-ccccc"
SETTINGS = {
    "enable": True,
    "namespace": NAMESPACE,
    "rollouter_deployment": "roll",
    "trainer_deployment": "train",
    "scale_to_zero_on_completion": True,
    "deletion_cost_interval_s": 0.2,
    "request_timeout_s": 2,
}
Make = Callable[..., Awaitable[Coordinator]]


def incarnation(pod: str, start: int = 1) -> str:
    return f"rollouter-{pod}-0000000{start}"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path_factory.mktemp("valkey"), PASSWORD) as server:
        yield server


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    api = KubeApi()
    api.add_deployment("roll", replicas=2)
    api.add_deployment("train")
    for pod in (A, B):
        api.add_pod(pod, "roll")
    api.add_pod("somebody-else", "other")
    (tmp_path / "kubeconfig").write_text(api.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield api
    api.close()


@pytest.fixture
async def make(tmp_path: Path, valkey: ValkeyServer, request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[Coordinator] = []

    async def make_(up: bool = True, **settings: Any) -> Coordinator:
        """With a lease so long that nothing can wait for it."""
        name = f"cluster-{abs(hash(request.node.nodeid))}-{len(made)}"
        more = {"kubernetes": SETTINGS | settings, "ledger": {"lease_s": 3600}}
        made.append(Coordinator(tmp_path / name, valkey, more))
        return await made[-1].up() if up else made[-1]

    yield make_
    for coordinator in made:
        await coordinator.close()


async def running(c: Coordinator, *pods: str) -> tuple[Trainer, list[Member]]:
    """A trainer and members that hold version 0 and a sample each."""
    members = [await c.member(incarnation(pod)) for pod in pods]
    trainer = await c.trainer()
    trainer.begin(0)
    for member in members:
        await member.expect("pause", "join", "load", "resume")
    await until(lambda: c.stats().version == 0, "the first commit")
    c.ledger.run(ops.issue(0, [b"p"] * 4, False))
    for member in members:
        assert c.ledger.run(ops.take(member.name, 0, 1)).items
    return trainer, members


def change(c: Coordinator, **settings: Any) -> None:
    """As the kubelet does it: another file in the place of the configuration."""
    file = c.folder / "run.yaml"
    config = yaml.safe_load(file.read_text())
    config["kubernetes"].update(settings)
    fresh = file.with_suffix(".new")
    fresh.write_text(yaml.safe_dump(config))
    fresh.replace(file)


def take(c: Coordinator, pod: str) -> str:
    return str(c.ledger.run(ops.take(incarnation(pod), c.stats().version, 1)).status)


async def test_a_pod_that_goes_is_not_waited_for(make: Make, kube: KubeApi) -> None:
    c = await make()
    trainer, (_, b) = await running(c, A, B)
    kube.delete_pod(A)
    await until(lambda: "rollouter is about to go" in c.log(), "the deletion to be seen")
    assert c.stats().in_flight_by_owner == {incarnation(A): 1, incarnation(B): 1}, (
        "it may still park its work"
    )
    again = await c.member(incarnation(A, 2))  # its container has restarted in the meantime
    kube.finish_delete(A)
    await until(lambda: c.stats().in_flight_by_owner == {incarnation(B): 1}, "its work to come back")
    assert set(c.stats().members) == {incarnation(B)}
    assert c.stats().requeued == {"expired": 1}
    await again.ended()
    assert "resume" not in again.unread, "a pod that is about to go is not taken in"

    trainer.begin(1)
    await b.expect("pause", "join", "load", "resume")
    await until(lambda: c.stats().version == 1, "the next commit")
    kube.finish_delete("somebody-else")
    assert take(c, B) == "ok"


async def test_what_was_missed_is_found_again(make: Make, kube: KubeApi) -> None:
    """The API fails, its history is gone, pods go meanwhile and while no coordinator runs."""
    c = await make()
    await running(c, A, B)
    await until(lambda: ("GET", f"/api/v1/namespaces/{NAMESPACE}/pods") in paths(kube), "the first list")
    kube.fail(503, times=2, path="/pods")
    kube.graceful = False
    kube.objects["pods"].pop(A)  # without a trace: the watch never tells
    kube.forget_history()
    await until(lambda: set(c.stats().members) == {incarnation(B)}, "the lost pod to be found")
    assert c.log().count("did not do it") <= 2, "one line per kind of trouble"

    c.kill()
    kube.delete_pod(B)
    kube.add_pod(NEW, "roll")
    await c.up()
    await until(lambda: not c.stats().in_flight_by_owner, "the pod that went while nobody looked")
    assert c.stats().requeued == {"expired": 2}


def paths(kube: KubeApi, since: int = 0) -> set[tuple[str, str]]:
    return {(method, path.partition("?")[0]) for method, path in kube.requests[since:]}


async def test_costs_follow_tokens_in_flight(make: Make, kube: KubeApi) -> None:
    c = await make()
    await running(c, A, B)
    key = telemetry.telemetry_key(c.folder.name)

    def tell(pod: str, tokens: int) -> None:
        now = RolloutTelemetry(1.0, 2.0, 1, 4, 100, 1, 0, 1.0, tokens_in_flight=tokens)
        c.ledger.redis.hset(key, incarnation(pod), telemetry.encode(now))

    def cost(pod: str) -> int:
        return int(kube.annotations(pod).get(DELETION_COST, "0"))

    tell(A, 5000)
    tell(B, 100)
    await until(lambda: cost(A) > 4 * cost(B) > 0, "both costs")
    kube.fail(500, times=2, path=f"/pods/{A}")
    tell(A, 0)
    await until(lambda: cost(A) == 0, "an idle pod to be free")
    before = len(kube.requests)
    kube.delete_pod(A)
    tell(A, 9000)
    tell(B, 105)
    await until(lambda: "rollouter is about to go" in c.log(), "the deletion to be seen")
    tell(B, 900)
    await until(lambda: cost(B) > 500, "the other one's cost")
    patched = [path for method, path in kube.requests[before:] if method == "PATCH"]
    assert patched == [f"/api/v1/namespaces/{NAMESPACE}/pods/{B}"], "not for little, not who goes anyway"


def serves(trainer: Trainer, version: int) -> Callable[[], bool]:
    return lambda: trainer.served == version


def has_version(c: Coordinator, version: int) -> Callable[[], bool]:
    return lambda: c.stats().version == version


async def test_the_number_of_rollouters_is_advised(make: Make, kube: KubeApi) -> None:
    c = await make(recommendation={"windows": 50})
    trainer, members = await running(c, A, B)
    change(c, recommendation={"windows": 2})
    await until(lambda: "kubernetes.recommendation.windows: 50 -> 2" in c.log(), "the change to be followed")
    key = recommendation.recommendation_key(c.folder.name)
    for version in (1, 2):
        for pod, active in ((A, 9.0), (B, 10.0)):
            now = RolloutTelemetry(active * version, 10.0 * version, 1, 4, 100, 1, 0)
            c.ledger.redis.hset(
                telemetry.telemetry_key(c.folder.name), incarnation(pod), telemetry.encode(now)
            )
        trainer.begin(version, wait_s=6.0, step_s=10.0)
        for member in members:
            await member.expect("pause", "load", "resume")
        await until(serves(trainer, version), "the commit")
        # Before the next figures are there: advice is read from what is there after a commit.
        await until(lambda: c.ledger.redis.exists(key), "the first advice")

    found = await until(
        lambda: (told := recommendation.decode(c.ledger.redis.get(key))) and told["rollouters"] != 2 and told,
        "more of them to be advised",
    )
    assert (found["rollouters"], found["why"]) == (4, "the trainer waits for samples")
    assert found["window"] == {"trainer_idle": 0.6, "rollouter_idle": pytest.approx(0.05), "rollouters": 2}


async def test_events_and_the_end(make: Make, kube: KubeApi) -> None:
    c = await make()
    trainer, (a, _) = await running(c, A, B)
    a.answers["load"] = lambda command: a.loaded(command, "digest-other")  # other weights than were sent
    trainer.begin(1)
    await until(lambda: trainer.served == 1, "the round without it")
    trainer.answers["send"] = lambda command: trainer.failed(command)
    trainer.begin(2)

    def about(reason: str) -> list[tuple[str, str]]:
        found = [e["involvedObject"] for e in kube.events() if e["reason"] == reason]
        return [(about["kind"], about["name"]) for about in found]

    await until(lambda: ("Pod", A) in about("ReplicaFenced"), "the event of the one that lied")
    await until(lambda: about("SyncFailed") == [("Deployment", "train")], "the event of the round")
    event = next(e for e in kube.events() if e["reason"] == "SyncFailed")
    assert (event["type"], event["metadata"]["namespace"]) == ("Warning", NAMESPACE)
    assert "abandoned" in event["message"]

    kube.fail(409, times=1, path="/scale")
    kube.fail(429, times=2, path="/scale", retry_after=0)
    assert (kube.replicas("roll"), kube.replicas("train")) == (2, 1)
    assert c.ledger.run(ops.complete(c.stats().lineage)) == "ok"
    await until(lambda: (kube.replicas("roll"), kube.replicas("train")) == (0, 0), "nothing to be left")
    await until(lambda: about("RunCompleted"), "its event")

    told = await asyncio.to_thread(run_kubectl, "get", "events", "-o", "json")
    assert '"RunCompleted"' in told
    await asyncio.to_thread(run_kubectl, "scale", "deployment/roll", "--replicas=3")
    assert kube.replicas("roll") == 3
    lines = await asyncio.to_thread(run_kubectl, "get", "pods", "-o", "name")
    assert set(lines.split()) == {f"pod/{A}", f"pod/{B}", "pod/somebody-else"}

    c.kill()
    before = len(kube.requests)
    await c.up()
    pods = ("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")
    await until(lambda: pods in paths(kube, before), "the new coordinator to have looked around")
    assert kube.replicas("roll") == 3, "what somebody scales up afterwards stays"
    trainer = await c.trainer()
    assert c.ledger.run(ops.complete(trainer.lineage)) == "ok"
    kube.fail(500, times=1, path="/events")
    await until(lambda: kube.replicas("roll") == 0, "a run that was opened again to end again")
    await until(lambda: len(about("RunCompleted")) == 2, "its event")
    scaled = [path for method, path in kube.requests[before:] if method == "PATCH" and "/scale" in path]
    assert len(scaled) == 2, "one for each Deployment"


async def test_the_end_is_told_where_nothing_is_scaled(make: Make, kube: KubeApi) -> None:
    c = await make(scale_to_zero_on_completion=False)
    await c.trainer()
    assert c.ledger.run(ops.complete(c.stats().lineage)) == "ok"
    await until(lambda: any(e["reason"] == "RunCompleted" for e in kube.events()), "its event")
    assert (kube.replicas("roll"), kube.replicas("train")) == (2, 1)


def run_kubectl(*words: str) -> str:
    """Reads KUBECONFIG."""
    done = subprocess.run([kubectl(), *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_without_an_api_the_run_goes_on(make: Make, kube: KubeApi) -> None:
    kube.fail(403, times=10**6)
    c = await make()
    trainer, (a, b) = await running(c, A, B)
    for version in (1, 2):
        trainer.begin(version)
        for member in (a, b):
            await member.expect("pause", "load", "resume")
        await until(has_version(c, version), "the commit")
    await until(lambda: "did not do it" in c.log(), "one word about it")
    assert c.log().count("did not do it") <= 2
    kube.mend()
    kube.delete_pod(A)
    kube.finish_delete(A)
    await until(lambda: set(c.stats().members) == {incarnation(B)}, "the cluster to be heard again")


@pytest.fixture
def cluster(kube: KubeApi, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """In this process. The client reads KUBECONFIG once, when it is imported."""
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", os.environ["KUBECONFIG"]
    )
    return Cluster(KubernetesConfig.model_validate(SETTINGS))


def test_a_deployment_that_selects_by_no_label_is_refused(cluster: Cluster, kube: KubeApi) -> None:
    """No labels would be all pods of the namespace."""
    assert cluster.pod_selector("roll") == "app=roll"
    kube.objects["deployments"]["roll"]["spec"]["selector"] = {"matchExpressions": []}
    with pytest.raises(ClusterError, match="roll has no matchLabels"):
        cluster.pod_selector("roll")


def test_a_repeat_of_what_has_come_through_is_no_failure(cluster: Cluster, kube: KubeApi) -> None:
    """The answer to the first attempt was lost."""
    for _ in range(2):
        cluster.create_event("one", "Pod", A, "why", "note", True, "pod", datetime.now(UTC))
    assert len(kube.events()) == 1


async def test_no_cluster_to_be_found(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    c = await make(up=False)
    c.start()
    assert await c.exit_code() == 78
    assert "kubernetes.enable: no cluster is to be found" in c.log()
