"""`k8s/`: current, free of credentials, and as the chart's own."""

from __future__ import annotations

import kubernetes_validate
import pytest

from scripts.manifests import MANIFESTS, PLAIN, manifest
from tests.deploy.helm import charts, pitfalls
from tests.deploy.helm.objects import Pod, of_kind, pods, read
from tests.deploy.helm.pod_security import violations

DATA = "math-data"
"""Written by hand: the claim that the examples take their rows from."""


def test_nothing_else_lies_there() -> None:
    assert {path.stem for path in PLAIN.glob("*.yaml")} == {*MANIFESTS, DATA}


def test_the_volume_of_the_examples_rows() -> None:
    """What is copied to it through the pod can be read by the queue service, and by that name."""
    objects = read((PLAIN / f"{DATA}.yaml").read_text())
    for thing in objects:
        for version in ("1.29", "1.37"):
            kubernetes_validate.validate(thing, version, strict=True)
    (claim,), (filler,) = of_kind(objects, "PersistentVolumeClaim"), of_kind(objects, "Pod")
    assert list(violations(Pod(filler, {}, filler["spec"]))) == []
    examples = [preset for preset in charts.PRESETS if preset.startswith("examples/")]
    for preset in examples:
        (queue,) = [pod for pod in pods(charts.rendered(preset)) if pod.component == "queue"]
        (volume,) = [v["persistentVolumeClaim"] for v in queue.spec["volumes"] if v["name"] == "data"]
        assert volume["claimName"] == claim["metadata"]["name"], preset
        assert filler["spec"]["securityContext"] == queue.spec["securityContext"]
    (shown,) = filler["spec"]["volumes"]
    assert shown["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert filler["spec"]["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_current(name: str) -> None:
    assert (PLAIN / f"{name}.yaml").read_text() == manifest(name), "run `make manifests`"


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_hold_no_credentials_and_no_hooks(name: str) -> None:
    objects = read((PLAIN / f"{name}.yaml").read_text())
    assert of_kind(objects, "Secret", "Pod") == []
    skipped = (
        pitfalls.selectors_of_others,
        pitfalls.peers_of_policies,
    )  # the policy of the test's pod, left out here
    problems = [p for check in pitfalls.CHECKS if check not in skipped for p in check(objects)]
    assert problems == []
