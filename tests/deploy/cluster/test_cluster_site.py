"""What `make test-cluster` says to kubectl and helm: the real programs, against an API that remembers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from headrace.config.run import RunConfig
from headrace.ledger.replies import Stats
from scripts.kube_tools import ROOT, run_helm
from tests.deploy.cluster import __main__ as program
from tests.deploy.cluster.judge import Broken, Reading
from tests.deploy.cluster.site import COMPONENTS, NoAnswer, Site
from tests.deploy.helm.objects import pods, read
from tests.kube_api import NAMESPACE, KubeApi

LABELS = {"app.kubernetes.io/instance": "demo"}
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    api = KubeApi()
    for component in COMPONENTS:
        name, labels = f"demo-{component}", LABELS | {"app.kubernetes.io/component": component}
        api.add_deployment(name, replicas=2)
        api.objects["deployments"][name]["metadata"]["labels"] = labels
        for number in range(2):
            spec = {"containers": [{"name": component, "image": "none"}]}
            made = {"metadata": {"name": f"{name}-{number}", "labels": labels}, "spec": spec}
            api.create("pods", made | {"status": READY if number else {"phase": "Pending"}})
    (tmp_path / "kubeconfig").write_text(api.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl keeps what it has discovered there
    yield api
    api.close()


def site() -> Site:
    made = program.site_of({"NAMESPACE": NAMESPACE, "CONTEXT": "fake"})
    assert made.release == "demo"
    return made


def test_pods_and_their_number(kube: KubeApi) -> None:
    here = site()
    assert here.pods("rollouter") == {"demo-rollouter-0": False, "demo-rollouter-1": True}
    before = set(here.all_pods())
    assert len(before) == 8
    again = kube.objects["pods"].pop("demo-queue-0")  # as a StatefulSet's
    kube.create("pods", again | {"metadata": {"name": "demo-queue-0", "labels": again["metadata"]["labels"]}})
    assert len(before - set(here.all_pods())) == 1
    here.delete("demo-rollouter-1")
    assert here.pods("rollouter") == {"demo-rollouter-0": False}, "one that is about to go does not count"
    here.scale(3)
    assert here.rollouters() == kube.replicas("demo-rollouter") == 3


def test_deployments_are_restarted(kube: KubeApi) -> None:
    """As the documentation shows it; that StatefulSets are too, of which this API knows nothing, is below."""
    said = site().kubectl("rollout", "restart", "deployment", "--selector=app.kubernetes.io/instance=demo")
    assert said.count("restarted") == 4
    template = kube.objects["deployments"]["demo-queue"]["spec"]["template"]
    assert "kubectl.kubernetes.io/restartedAt" in template["metadata"]["annotations"]


def test_the_words_of_an_installation_render() -> None:
    """Images, number of samples and an upgrade's changes reach the manifests."""
    variables = {"REGISTRY": "registry.example/team/", "TAG": "7", "SAMPLES": "640"}
    made = program.site_of(variables)
    words = made.chart_words({"config.async_training.staleness_threshold": 0.75})
    objects = read(run_helm("template", *words))
    images = {c["image"] for pod in pods(objects) for c in pod.containers}
    assert {f"registry.example/team/{name}:7" for name in COMPONENTS} <= images
    (config,) = [o for o in objects if o["metadata"]["name"] == "demo-config"]
    run = RunConfig.model_validate(yaml.safe_load(config["data"]["config.yaml"]))
    assert (run.rollout.total_rollout_steps, run.async_training.staleness_threshold) == (640, 0.75)
    assert made._port("rollouter", "http") in {
        port for pod in pods(objects) if pod.component == "rollouter" for port in pod.port_names.values()
    }
    with pytest.raises(Broken, match="VALUES"):
        program.site_of({"DEVICE": "cuda"})


STAND_IN = """#!/bin/sh
echo "$@" >> "{folder}/calls"
case "$*" in
  *"get namespace"*) cat "{folder}/namespace" ;;
  *"--output=name"*) cat "{folder}/there" ;;
  *"create --filename=-"*) cat > "{folder}/made" ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl and a helm that write down how they were called; everything but a look fails."""
    for name in ("kubectl", "helm"):
        (tmp_path / name).write_text(STAND_IN.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    for name in ("namespace", "there"):
        (tmp_path / name).write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_everything_is_restarted(calls: Path) -> None:
    with pytest.raises(NoAnswer):  # the stand-in's
        site().restart_everything()
    assert (
        (calls / "calls")
        .read_text()
        .strip()
        .endswith("rollout restart deployment,statefulset --selector=app.kubernetes.io/instance=demo")
    )


def test_a_namespace_in_use_is_left_alone(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (calls / "namespace").write_text("namespace/headrace-test\n")
    (calls / "there").write_text("configmap/kube-root-ca.crt\npod/somebody-elses\n")
    assert program.main({}) == 2
    assert "namespace headrace-test is in use (pod/somebody-elses)" in capsys.readouterr().err
    assert not [line for line in (calls / "calls").read_text().splitlines() if " get " not in line]


def test_what_was_made_is_removed_after_a_failure(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here the installation fails, and so does the removal: both are told."""
    assert program.main({}) == 1
    made = json.loads((calls / "made").read_text())
    assert made["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    asked = (calls / "calls").read_text().splitlines()
    assert any(" install demo " in line for line in asked)
    assert asked[-1].endswith("delete namespace headrace-test --ignore-not-found")
    said = capsys.readouterr().err
    assert "install demo" in said
    assert "namespace headrace-test is still there" in said


def test_a_namespace_of_others_stays(calls: Path) -> None:
    (calls / "namespace").write_text("namespace/mine\n")
    (calls / "there").write_text("configmap/kube-root-ca.crt\n")
    assert program.main({"NAMESPACE": "mine"}) == 1
    asked = (calls / "calls").read_text()
    assert "delete namespace" not in asked
    assert "uninstall demo" in asked


def test_everything_stays_where_that_is_asked_for(calls: Path) -> None:
    assert program.main({"KEEP": "1"}) == 1
    asked = (calls / "calls").read_text()
    assert "delete" not in asked
    assert "uninstall" not in asked


def test_make_starts_it() -> None:
    """Variables of make's command line are those of the program: make exports them."""
    words = ["make", "--no-print-directory", "-n", "test-cluster", "NAMESPACE=here"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.strip().endswith("-m tests.deploy.cluster")


def test_a_reading_is_what_the_queue_service_serves() -> None:
    """Which is `Stats` as it is (`GET /stats`)."""
    own = {"trained", "issued", "members", "missing"}  # made of counts, issued_total and members
    served = {field.name for field in fields(Stats)}
    assert {field.name for field in fields(Reading)} - own <= served
    assert {"counts", "issued_total", "members"} <= served
