"""A key that is left empty is null: it is refused by its name, or it means that there is nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from scripts.kube_tools import HelmFailed
from scripts.manifests import SCHEMA
from tests.deploy.helm import charts, pitfalls
from tests.deploy.helm.objects import name_of
from tests.deploy.helm.test_presets import CUSTOM, assert_valid

Key = tuple[str, ...]
DEFAULTS: dict[str, Any] = yaml.safe_load((charts.CHART / "values.yaml").read_text())
OWN = ("config", "files", "resources", "podSecurityContext", "pdb", "labels", "env", "podSelector")
"""What lies in these is the user's, or the configuration's."""


def keys(node: dict[str, Any], at: Key = ()) -> Iterator[Key]:
    for key, value in node.items():
        yield (*at, key)
        if isinstance(value, dict) and key not in OWN:
            yield from keys(value, (*at, key))


def without(values: dict[str, Any], key: Key) -> dict[str, Any]:
    """Helm takes a null for no key at all."""
    out = copy.deepcopy(values)
    node = out
    for step in key[:-1]:
        node = node[step]
    del node[key[-1]]
    return out


@pytest.fixture(scope="module")
def free() -> list[Key]:
    """Keys that the schema lets go, the outermost of them; without the server's version, for which its digest
    may stand, and which is asked for by name."""
    schema = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert schema.is_valid(DEFAULTS)
    found = [key for key in keys(DEFAULTS) if schema.is_valid(without(DEFAULTS, key))]
    outermost = [k for k in found if not any(k[: len(other)] == other and k != other for other in found)]
    return [key for key in outermost if key != ("redis", "image", "tag")]


def test_what_may_be_empty_is_nothing(free: list[Key]) -> None:
    """All of it at once: every template copes, and the API takes what they make."""
    assert {("rollouter", "tolerations"), ("trainer", "podLabels"), ("networkPolicy", "extraEgress")} <= set(
        free
    )
    assert len(free) > 80
    more = [
        "monitoring.podMonitors.enabled=true",
        "monitoring.rules.enabled=true",
        "monitoring.dashboards.enabled=true",
    ]
    objects = charts.rendered(sets=(*more, *(f"{'.'.join(key)}=null" for key in free)))
    for thing in objects:
        if thing["kind"] not in CUSTOM:
            assert_valid(json.dumps(thing))
    checks = [check for check in pitfalls.CHECKS if check is not pitfalls.quantities]
    assert [problem for check in checks for problem in check(objects)] == []
    assert {name_of(o) for o in objects} >= {"Deployment demo-trainer", "PodMonitor demo-trainer"}


@pytest.mark.parametrize(
    "key", ["rollouter", "tls", "networkPolicy.dns", "trainer.shmSize", "redis.persistence.retain"]
)
def test_what_may_not_is_named(key: str) -> None:
    *at, leaf = key.split(".")
    with pytest.raises(HelmFailed) as refused:
        charts.text(sets=(f"{key}=null",))
    assert f"at '{''.join('/' + step for step in at)}': missing property '{leaf}'" in str(refused.value)
