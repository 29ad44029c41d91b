"""An upgrade of a run that is complete: whatever the coordinator has scaled to none stays there.

The coordinator's own client and kubectl scale on an API that notes who has set the number, and the chart is
rendered with what that API holds then.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.config import kube_config

from headrace.config.kubernetes import KubernetesConfig
from headrace_coordinator.kube.api import Cluster
from scripts.kube_tools import kubectl
from tests.deploy.helm import charts
from tests.deploy.helm.objects import Object
from tests.deploy.helm.test_upgrades import get, installed, upgrade
from tests.kube_api import NAMESPACE, KubeApi

ROLLOUTERS, TRAINER = "demo-rollouter", "demo-trainer"
SET = 'trainer.workload="leaderWorkerSet"'


class Release:
    """The release's workloads, in a cluster that others scale."""

    def __init__(self, api: KubeApi, folder: Path, sets: tuple[str, ...]) -> None:
        self.api, self.folder, self.sets = api, folder, sets
        self.objects = installed(sets)
        self.kind = "LeaderWorkerSet" if SET in sets else "Deployment"
        for kind, name in (("Deployment", ROLLOUTERS), (self.kind, TRAINER)):
            body = get(self.objects, kind, name)
            body.setdefault("status", {"replicas": body["spec"]["replicas"]})
            api.create(f"{kind.lower()}s", body)

    def completes(self) -> None:
        settings = KubernetesConfig(
            namespace=NAMESPACE,
            rollouter_deployment=ROLLOUTERS,
            trainer_deployment=TRAINER,
            trainer_kind=self.kind,
            request_timeout_s=5,
        )
        for name in (ROLLOUTERS, TRAINER):
            Cluster(settings).scale(name, 0)

    def scale(self, name: str, replicas: int) -> None:
        subprocess.run(
            [kubectl(), "scale", f"deployment/{name}", f"--replicas={replicas}"],
            env={"KUBECONFIG": str(self.folder / "kube"), "HOME": str(self.folder)},
            check=True,
            timeout=60,
        )

    def upgraded(self, *sets: str) -> tuple[int, int]:
        """Rollouters and trainer after an upgrade with these values."""
        live = [o for kind in ("deployments", "leaderworkersets") for o in self.api.objects[kind].values()]
        others: list[Object] = [o for o in self.objects if o["metadata"]["name"] not in (ROLLOUTERS, TRAINER)]
        after = upgrade([*others, *live], self.folder, *self.sets, *sets)
        return (
            get(after, "Deployment", ROLLOUTERS)["spec"]["replicas"],
            get(after, self.kind, TRAINER)["spec"]["replicas"],
        )


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    found = KubeApi()
    (tmp_path / "kube").write_text(found.kubeconfig())
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kube"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield found
    found.close()


@pytest.mark.parametrize("sets", [(), ("rollouter.replicas=5",), (SET,)], ids=["", "fixed number", "set"])
def test_a_completed_run_is_not_woken(api: KubeApi, tmp_path: Path, sets: tuple[str, ...]) -> None:
    release = Release(api, tmp_path, sets)
    before = release.upgraded()
    assert min(before) > 0
    release.completes()
    assert release.upgraded('config.actor.optim={"lr":1e-6}') == (0, 0)


def test_what_somebody_starts_again_stays(api: KubeApi, tmp_path: Path) -> None:
    release = Release(api, tmp_path, ("rollouter.replicas=5",))
    release.completes()
    release.scale(TRAINER, 1)
    assert release.upgraded() == (5, 1), "the chart's numbers hold again"


def test_a_pause_by_hand_ends_with_the_upgrade(api: KubeApi, tmp_path: Path) -> None:
    """It is no completion, also after one."""
    release = Release(api, tmp_path, ())
    release.scale(TRAINER, 0)
    assert release.upgraded() == (2, 1)
    release.scale(TRAINER, 1)
    release.completes()
    release.scale(TRAINER, 1)
    release.scale(TRAINER, 0)
    assert release.upgraded() == (0, 1)


def test_a_run_of_its_own_starts(api: KubeApi, tmp_path: Path) -> None:
    """Under the same name, once the release of the run before is gone."""
    first = charts.rendered()
    after = upgrade([], tmp_path)
    assert get(after, "Deployment", TRAINER)["spec"] == get(first, "Deployment", TRAINER)["spec"]
