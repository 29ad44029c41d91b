"""An upgrade of a run that goes on: what stays, what may change, what is refused.

Rendered against an API that holds the first installation's objects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from headrace.runner.layout import FIXED_KEYS
from tests.helm import charts
from tests.helm.cluster import cluster
from tests.helm.objects import Object, of_kind, read
from tests.helm.tools import HelmFailed, run_helm

FIXED = yaml.safe_load((charts.CHART / "fixed-keys.yaml").read_text())


def installed(sets: tuple[str, ...] = ()) -> list[Object]:
    """What an installation leaves in the cluster."""
    objects = charts.rendered(sets=sets)
    for thing in objects:
        thing["metadata"]["annotations"] = {
            "meta.helm.sh/release-name": "demo",
            "meta.helm.sh/release-namespace": "tests",
        }
    return objects


def upgrade(before: Sequence[Object], folder: Path, *sets: str) -> list[Object]:
    """The objects of an upgrade, rendered as Helm does it with a cluster at hand."""
    words = [word for pair in sets for word in ("--set-json", pair)]
    with cluster(before, folder) as kubeconfig:
        text = run_helm(
            "template", "demo", str(charts.CHART), "--namespace", "tests", "--dry-run=server",
            "--disable-openapi-validation", "--kubeconfig", str(kubeconfig), *words,
        )  # fmt: skip
    return read(text)


def get(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = [o for o in of_kind(objects, kind) if o["metadata"]["name"] == name]
    return found


def config_hash(objects: Sequence[Object], component: str) -> str:
    kind = "StatefulSet" if component == "redis" else "Deployment"
    annotations = get(objects, kind, f"demo-{component}")["spec"]["template"]["metadata"]["annotations"]
    found: str = annotations["headrace/config-hash"]
    return found


COMPONENTS = ("rollouter", "trainer", "queue", "coordinator", "redis")


def rolled(before: Sequence[Object], after: Sequence[Object]) -> set[str]:
    """The components whose pods a change replaces: their template is another one."""

    def template(objects: Sequence[Object], component: str) -> object:
        kind = "StatefulSet" if component == "redis" else "Deployment"
        return get(objects, kind, f"demo-{component}")["spec"]["template"]

    return {c for c in COMPONENTS if template(before, c) != template(after, c)}


def test_credentials_are_made_once(tmp_path: Path) -> None:
    before = installed()
    again = charts.read(run_helm("template", "demo", str(charts.CHART)))
    assert get(again, "Secret", "demo-auth")["data"] != get(before, "Secret", "demo-auth")["data"]
    after = upgrade(before, tmp_path)
    assert get(after, "Secret", "demo-auth")["data"] == get(before, "Secret", "demo-auth")["data"]


def test_what_kubectl_scale_made_of_it_stays(tmp_path: Path) -> None:
    before = installed()
    rollouters = get(before, "Deployment", "demo-rollouter")
    assert rollouters["spec"]["replicas"] == 2
    for number in (7, 0):
        rollouters["spec"]["replicas"] = number
        assert get(upgrade(before, tmp_path), "Deployment", "demo-rollouter")["spec"]["replicas"] == number
    after = upgrade(before, tmp_path, "rollouter.replicas=4")
    assert get(after, "Deployment", "demo-rollouter")["spec"]["replicas"] == 4


def test_nothing_is_replaced_for_nothing(tmp_path: Path) -> None:
    before = installed()
    assert rolled(before, upgrade(before, tmp_path)) == set()


@pytest.mark.parametrize(
    ("change", "components"),
    [
        ('config.async_training={"staleness_threshold":0.75,"trigger_parameter_sync_step":4}', set()),
        ("config.rollout.replicas=5", set()),
        ('config.actor.optim={"lr":1e-6}', {"trainer", "queue", "coordinator"}),
        ("config.trainer.save_interval_s=60", {"trainer", "queue", "coordinator"}),
        ("config.rollout.temperature=0.9", {"rollouter", "trainer", "queue", "coordinator"}),
        ('redis.maxmemory="10gb"', {"redis"}),
        ('files={"reward.py":"x = 1"}', {"rollouter", "trainer", "queue", "coordinator"}),
    ],
)
def test_a_change_rolls_the_right_pods(change: str, components: set[str]) -> None:
    before = charts.rendered(sets=('config.async_training={"staleness_threshold":0.5}',))
    after = charts.rendered(sets=('config.async_training={"staleness_threshold":0.5}', change))
    assert rolled(before, after) == components
    configs = [get(objects, "ConfigMap", "demo-config")["data"] for objects in (before, after)]
    assert (configs[0] != configs[1]) == change.startswith("config."), (
        "the new value is there for who reads it live"
    )


VALUES = {
    "name": '"other"',
    "seed": "7",
    "model.path": '"/model/other"',
    "model.dtype": '"float16"',
    "data.train_files": '["/data/other"]',
    "data.val_files": '["/data/val"]',
    "data.max_prompt_length": "100",
    "data.max_response_length": "100",
    "data.shuffle": "false",
    "rollout.n": "4",
    "rollout.total_rollout_steps": "9999",
    "actor.ppo_mini_batch_size": "96",
    "critic.enable": "true",
    "val.n": "3",
}


def test_what_the_run_was_begun_with_cannot_change(tmp_path: Path) -> None:
    """All at once; each is told."""
    changed: dict[str, object] = {}
    for key, value in VALUES.items():
        section, _, leaf = key.rpartition(".")
        (changed.setdefault(section, {}) if section else changed)[leaf] = yaml.safe_load(value)  # type: ignore
    with pytest.raises(HelmFailed) as refused:
        upgrade(installed(), tmp_path, f"config={json.dumps(changed)}")
    for key, value in VALUES.items():
        assert f"config.{key}: was " in str(refused.value)
        assert f" and is {value} now" in str(refused.value)
    assert "another release name" in str(refused.value)


def test_redis_cannot_change(tmp_path: Path) -> None:
    with pytest.raises(HelmFailed) as refused:
        upgrade(installed(), tmp_path, 'redis.external.url="redis://elsewhere:6379/0"')
    assert 'config.redis.url: was null when the run was begun and is "redis://elsewhere:6379/0" now' in str(
        refused.value
    )


def test_every_fixed_key_of_a_run_is_one_of_the_chart() -> None:
    assert set(FIXED) == {*FIXED_KEYS, "name"}
    assert {*VALUES, "redis.url"} == set(FIXED)


def test_what_an_uninstall_leaves_is_what_the_notes_say() -> None:
    objects = charts.rendered()
    kept = [
        o["metadata"]["name"]
        for o in objects
        if "helm.sh/resource-policy" in o["metadata"].get("annotations", {})
    ]
    assert kept == ["demo-checkpoints"]
    policy = get(objects, "StatefulSet", "demo-redis")["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert policy == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    gone = charts.rendered(sets=("checkpoints.retain=false", "redis.persistence.retain=false"))
    assert not [o for o in gone if "helm.sh/resource-policy" in o["metadata"].get("annotations", {})]
    policy = get(gone, "StatefulSet", "demo-redis")["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert policy["whenDeleted"] == "Delete"
