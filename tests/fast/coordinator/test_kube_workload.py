"""What the trainer is in the cluster: a Deployment, or a LeaderWorkerSet; the real client, on a fake API."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes.config import kube_config

from headrace.config.kubernetes import KubernetesConfig
from headrace_coordinator.kube.api import Cluster, ClusterError
from tests.kube_api import NAMESPACE, KubeApi


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    api = KubeApi()
    api.add_deployment("roll", replicas=2)
    (tmp_path / "kubeconfig").write_text(api.kubeconfig())
    # The client reads KUBECONFIG once, when it is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield api
    api.close()


def cluster(kind: str) -> Cluster:
    settings: dict[str, Any] = {"rollouter_deployment": "roll", "trainer_deployment": "train"}
    return Cluster(KubernetesConfig(namespace=NAMESPACE, trainer_kind=kind, request_timeout_s=5, **settings))


def tell(found: Cluster, kind: str, about: str) -> None:
    found.create_event(
        f"{kind.lower()}-{about}", kind, about, "Tuned", "why", False, "coordinator", datetime.now(UTC)
    )


def regarding(kube: KubeApi) -> list[tuple[str, str, str]]:
    found = [e["involvedObject"] for e in kube.events()]
    return [(about["apiVersion"], about["kind"], about["name"]) for about in found]


def test_a_leader_worker_set_is_scaled_and_told(kube: KubeApi) -> None:
    kube.add_leader_worker_set("train", size=4)
    found = cluster("LeaderWorkerSet")
    found.scale("train", 0)
    found.scale("roll", 0)
    assert (kube.replicas("train"), kube.replicas("roll")) == (0, 0)
    assert kube.get("leaderworkersets", "train")["spec"]["leaderWorkerTemplate"]["size"] == 4
    for kind, about in (("Deployment", "train"), ("Deployment", "roll"), ("Pod", "train")):
        tell(found, kind, about)
    assert regarding(kube) == [
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "train"),
        ("apps/v1", "Deployment", "roll"),
        ("v1", "Pod", "train"),
    ]


def test_a_deployment_is_what_it_was(kube: KubeApi) -> None:
    kube.add_deployment("train", replicas=4)
    found = cluster("Deployment")
    found.scale("train", 0)
    assert kube.replicas("train") == 0
    tell(found, "Deployment", "train")
    assert regarding(kube) == [("apps/v1", "Deployment", "train")]


def test_a_set_that_is_not_there_is_an_answer(kube: KubeApi) -> None:
    with pytest.raises(ClusterError, match="404") as refused:
        cluster("LeaderWorkerSet").scale("train", 0)
    assert (refused.value.call, refused.value.status) == ("scale", 404)
