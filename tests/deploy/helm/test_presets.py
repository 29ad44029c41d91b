"""Every preset, rendered: valid for the API, free of what a cluster mistreats, and a run that can start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from kubernetes_validate import utils

from headrace.config import loading
from headrace.config.run import RunConfig
from headrace.local import assets
from scripts.kube_tools import ROOT
from tests.deploy.helm import charts, leader_worker_set, pitfalls
from tests.deploy.helm.objects import Object, name_of, of_kind, pods
from tests.deploy.helm.pod_security import violations

VERSIONS = ("1.29", "1.37")
"""The oldest that the chart admits, and the newest that there are schemas for."""
CUSTOM = {
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "Certificate": "cert-manager.io/v1",
    "LeaderWorkerSet": leader_worker_set.API_VERSION,
}


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """kubernetes-validate reads all its definitions for every object."""
    with mock.patch.object(utils, "schema_contents", cache(utils.schema_contents)):
        yield


@cache
def assert_valid(text: str) -> None:
    """Many presets share most of their objects."""
    for version in VERSIONS:
        utils.validate(json.loads(text), version, strict=True)


@pytest.mark.parametrize("preset", charts.ALL)
def test_objects_are_what_the_api_takes(preset: str) -> None:
    for thing in charts.rendered(preset):
        if thing["kind"] in CUSTOM:
            assert thing["apiVersion"] == CUSTOM[thing["kind"]], name_of(thing)
        if thing["kind"] == "LeaderWorkerSet":
            assert list(leader_worker_set.violations(thing)) == []
            assert_valid(json.dumps(leader_worker_set.pod_template(thing)))
        elif thing["kind"] not in CUSTOM:
            assert_valid(json.dumps(thing))


@pytest.mark.parametrize("preset", charts.ALL)
def test_nothing_that_a_cluster_mistreats(preset: str) -> None:
    objects = charts.rendered(preset)
    assert [problem for check in pitfalls.CHECKS for problem in check(objects)] == []


@pytest.mark.parametrize("preset", charts.ALL)
def test_pod_security_restricted(preset: str) -> None:
    """Of every pod. RDMA alone needs a capability that it refuses, on the pods with GPUs."""
    objects = charts.rendered(preset)
    found = [problem for pod in pods(objects) for problem in violations(pod)]
    rdma = preset in ("ci/rdma.yaml", "examples/128-gpus.yaml")
    allowed = ["rollouter", "trainer"] if rdma else []
    assert found == [f"Deployment demo-{name}: {name} adds the capability IPC_LOCK" for name in allowed]
    assert all(
        c["securityContext"]["readOnlyRootFilesystem"] for pod in pods(objects) for c in pod.containers
    )


@pytest.mark.parametrize("preset", charts.ALL)
def test_the_run_is_one_that_headrace_takes(preset: str, tmp_path: Path) -> None:
    """The configuration in the ConfigMap passes the same models; Helm's own is not changed on its way."""
    found = pitfalls.run_config(charts.rendered(preset))
    if not _knows_kubernetes():
        found.pop("kubernetes", None)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(found))
    config = loading.load(tmp_path / "config.yaml")
    assert config.services.host == "0.0.0.0"
    assert not assets.demo_names(config), "services know no demo: names"


def _knows_kubernetes() -> bool:
    return "kubernetes" in RunConfig.model_fields


def test_the_demo_is_that_of_the_command_line() -> None:
    wanted = loading.load(ROOT / "configs" / "demo.yaml").model_dump()
    found = RunConfig.model_validate(pitfalls.run_config(charts.rendered("ci/demo-cpu.yaml"))).model_dump()
    for key in ("name", "services", "redis", "model", "data"):
        wanted.pop(key), found.pop(key)
    assert found == wanted


def test_the_baseline_is_one() -> None:
    """What is held against it differs in nothing but who has which GPUs when."""
    both = ["examples/one-node-8-gpus.yaml", "examples/colocated-8-gpus.yaml"]
    found = [RunConfig.model_validate(pitfalls.run_config(charts.rendered(preset))) for preset in both]
    plain = [config.to_plain() for config in found]
    for config in plain:
        for key in ("mode", "async_training", "sync"):
            config.pop(key)
        for key in ("replicas", "test_freq"):
            config["rollout"].pop(key)
        config["rollout"]["engine"].pop("gpu_memory_utilization")
        config["trainer"].pop("n_gpus_per_node")
    assert plain[0] == plain[1]
    ahead, baseline = found
    assert ahead.samples_per_update == baseline.samples_per_update
    per_validation = [c.rollout.test_freq * c.rule.sync_steps for c in found]
    assert per_validation[0] == per_validation[1]
    assert baseline.gpu_sharing is not None
    assert ahead.world_size + ahead.rollout.replicas == baseline.world_size == baseline.rollout.replicas == 8


@pytest.mark.parametrize("preset", charts.ALL)
def test_gpus_follow_from_the_run(preset: str) -> None:
    objects = charts.rendered(preset)
    config = RunConfig.model_validate(
        {k: v for k, v in pitfalls.run_config(objects).items() if k in RunConfig.model_fields}
    )
    name = "nvidia.com/gpu" if config.gpu_sharing is None else "nvidia.com/gpu.shared"
    gpus = {
        pod.component: sum(c["resources"]["limits"].get(name, 0) for c in pod.containers)
        for pod in pods(objects)
    }
    on_gpus = config.trainer.device == "cuda"
    assert gpus.pop("rollouter") == (config.rollout.engine.tensor_parallel_size if on_gpus else 0)
    assert gpus.pop("trainer") == (config.trainer.n_gpus_per_node if on_gpus else 0)
    assert set(gpus.values()) == {0}
    (trainer,) = [pod.owner for pod in pods(objects) if pod.component == "trainer"]
    if trainer["kind"] == "LeaderWorkerSet":
        assert trainer["spec"]["replicas"] == 1
        assert trainer["spec"]["leaderWorkerTemplate"]["size"] == config.trainer.nnodes
    else:
        assert trainer["spec"]["replicas"] == config.trainer.nnodes


@pytest.mark.parametrize(
    ("one", "two"), [("demo", "demo-2"), ("a" * 53, "a" * 52 + "b"), ("redis", "demo-redis")]
)
@pytest.mark.parametrize("preset", ["ci/everything.yaml", "ci/leader-worker-set.yaml"])
def test_two_releases_share_a_namespace(preset: str, one: str, two: str) -> None:
    """No name twice, and nothing of one takes a pod of the other."""
    first = charts.rendered(preset, one)
    second = charts.rendered(preset, two)
    assert there(first).isdisjoint(there(second))
    for objects, others in ((first, second), (second, first)):
        assert [problem for check in pitfalls.CHECKS for problem in check(objects)] == []
        for thing in of_kind(
            objects, "Service", "PodMonitor", "PodDisruptionBudget", "NetworkPolicy", "Deployment"
        ):
            spec = thing["spec"]
            selector = spec.get("podSelector") or spec["selector"]
            if thing["kind"] == "Service":
                selector = {"matchLabels": selector}
            assert not [pod.name for pod in pods(others) if pitfalls.matches(selector, pod.labels)], name_of(
                thing
            )


def there(objects: Sequence[Object]) -> set[str]:
    """Names in the cluster, with what controllers make."""
    return {*map(name_of, objects), *(f"{kind} {name}" for kind, name in pitfalls.made_by_others(objects))}


def test_no_drain_takes_what_the_trainer_hangs_on() -> None:
    """The ledger is Redis's. All go on without a coordinator for a while."""
    budgets = {o["metadata"]["name"]: o["spec"] for o in of_kind(charts.rendered(), "PodDisruptionBudget")}
    for component in ("trainer", "redis"):
        assert budgets[f"demo-{component}"]["maxUnavailable"] == 0
    assert "demo-coordinator" not in budgets


def test_the_demo_fits_into_the_machine_that_the_page_asks_for() -> None:
    """With a rollouter more, as the story on kind scales to, and what a cluster of one node needs itself."""
    said = re.compile(r"bout (\d+) cores and (\d+) GiB")
    page = said.findall((ROOT / "docs" / "kubernetes.md").read_text())
    assert page == said.findall(charts.preset_path("ci/demo-cpu.yaml").read_text())
    ((cores, memory),) = page
    objects = charts.rendered("ci/demo-cpu.yaml")
    needs = {"cpu": 1.0, "memory": 0.5 * 2**30}  # kind's own pods
    for pod in pods(objects):
        if pod.owner["kind"] != "Pod":
            number = pod.owner["spec"]["replicas"] + (pod.component == "rollouter")
            for resource in needs:
                needs[resource] += number * requested(pod.spec, resource)
    assert needs["cpu"] <= int(cores)
    assert needs["memory"] <= int(memory) * 2**30


def requested(spec: dict[str, Any], resource: str) -> float:
    """By a pod: its containers together, or an init container if that is more."""

    def of(container: dict[str, Any]) -> float:
        return pitfalls.quantity(container["resources"]["requests"][resource]) or 0.0

    together = sum(of(c) for c in spec["containers"])
    return max([together, *(of(c) for c in spec.get("initContainers", []))])


def test_the_default_image_is_the_charts_version() -> None:
    images = {c["image"] for pod in pods(charts.rendered()) for c in pod.containers}
    version = yaml.safe_load((charts.CHART / "Chart.yaml").read_text())["appVersion"]
    ours = {f"headrace/{name}:{version}" for name in ("rollouter", "trainer", "queue", "coordinator")}
    assert images == {*ours, "valkey/valkey:9.1.2"}
    digests = {c["image"] for pod in pods(charts.rendered("ci/everything.yaml")) for c in pod.containers}
    assert any("@sha256:" in image for image in digests)
    assert all(i.startswith("registry.example.com/team/headrace/") for i in digests if "valkey" not in i)


def test_data_may_be_mixed_or_stand_alone() -> None:
    """As in the run's own file: one entry, or entries with weights; a demo's names become paths in both."""
    demo = 'config={"model":{"path":"demo:spell_backward"},"trainer":{"device":"cpu"}}'
    alone = charts.rendered(sets=(demo, 'config.data.train_files="demo:spell_backward/train"'))
    assert pitfalls.run_config(alone)["data"]["train_files"] == ["/demo/current/train.jsonl"]
    mixture = '[{"path":"demo:spell_backward/train","weight":2},"reasoning_gym:gsm_symbolic?size=10"]'
    mixed = charts.rendered(sets=(demo, f"config.data.train_files={mixture}"))
    assert pitfalls.run_config(mixed)["data"]["train_files"] == [
        {"path": "/demo/current/train.jsonl", "weight": 2},
        "reasoning_gym:gsm_symbolic?size=10",
    ]


def test_rewards_of_another_kind_replace_the_example(tmp_path: Path) -> None:
    sources = 'config.reward={"sources":{"answer":{"kind":"math_verify"}}}'
    found = pitfalls.run_config(charts.rendered(sets=(sources,)))
    assert "custom_reward_function" not in found
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(found))
    assert loading.load(tmp_path / "config.yaml").reward.sources["answer"].kind == "math_verify"
    ours = charts.rendered(sets=(sources, 'config.custom_reward_function={"path":"mine"}'))
    assert pitfalls.run_config(ours)["custom_reward_function"] == {"path": "mine"}, (
        "both: the run refuses that"
    )
