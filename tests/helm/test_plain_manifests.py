"""`k8s/`: current, free of credentials, and as the chart's own."""

from __future__ import annotations

import pytest

from tests.helm import pitfalls
from tests.helm.objects import of_kind, read
from tests.helm.render import MANIFESTS, PLAIN, manifest


def test_nothing_else_lies_there() -> None:
    assert {path.stem for path in PLAIN.glob("*.yaml")} == set(MANIFESTS)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_current(name: str) -> None:
    assert (PLAIN / f"{name}.yaml").read_text() == manifest(name), "run `python -m tests.helm.render`"


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
