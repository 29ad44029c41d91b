"""An upgrade of a run that goes on: what stays, what may change, what is refused.

Rendered against an API that holds the first installation's objects.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import yaml

from scripts import manifests
from scripts.kube_tools import HelmFailed, run_helm
from tests.deploy.helm import charts
from tests.deploy.helm.cluster import cluster
from tests.deploy.helm.objects import Object, of_kind, read

FIXED = yaml.safe_load(manifests.LIFETIMES.read_text())["run"]


def installed(sets: tuple[str, ...] = ()) -> list[Object]:
    """What an installation leaves in the cluster."""
    objects = charts.rendered(sets=sets)
    for thing in objects:
        thing["metadata"].setdefault("annotations", {}).update(
            {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": "tests"}
        )
    return objects


def upgrade(
    before: Sequence[Object], folder: Path, *sets: str, readable: Collection[str] | None = None
) -> list[Object]:
    """The objects of an upgrade, rendered as Helm does it with a cluster at hand, of which only the kinds in
    `readable` may be read."""
    words = [word for pair in sets for word in ("--set-json", pair)]
    with cluster(before, folder, readable) as kubeconfig:
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


def test_the_autoscaler_takes_over_the_number_that_is_there(tmp_path: Path) -> None:
    """Left out, it would become 1, since Helm owned the field. A first installation leaves it out."""
    before = installed()
    get(before, "Deployment", "demo-rollouter")["spec"]["replicas"] = 7
    on = ("kubernetes.enabled=true", "autoscaling.enabled=true")
    after = upgrade(before, tmp_path, *on)
    assert get(after, "Deployment", "demo-rollouter")["spec"]["replicas"] == 7
    assert "replicas" not in get(charts.rendered(sets=on), "Deployment", "demo-rollouter")["spec"]


def test_nothing_is_replaced_for_nothing(tmp_path: Path) -> None:
    before = installed()
    assert rolled(before, upgrade(before, tmp_path)) == set()


@pytest.mark.parametrize(
    ("change", "components"),
    [
        ('config.async_training={"staleness_threshold":0.75,"trigger_parameter_sync_step":4}', set()),
        ('config.async_training={"staleness_threshold":0}', {"rollouter", "trainer", "queue", "coordinator"}),
        ("config.rollout.replicas=5", set()),
        ('config.actor.optim={"lr":1e-6}', {"trainer", "queue", "coordinator"}),
        ("config.trainer.save_interval_s=60", {"trainer", "queue", "coordinator"}),
        ("config.rollout.temperature=0.9", {"rollouter", "trainer", "queue", "coordinator"}),
        ('redis.maxmemory="10gb"', {"redis"}),
        (
            'config.redis={"max_memory_bytes":10000000000}',
            {"rollouter", "trainer", "queue", "coordinator", "redis"},
        ),
        ("kubernetes.enabled=true", {"coordinator"}),
        ('files={"reward.py":"x = 1"}', {"rollouter", "trainer", "queue", "coordinator"}),
    ],
)
def test_a_change_rolls_the_right_pods(change: str, components: set[str]) -> None:
    before = charts.rendered(sets=('config.async_training={"staleness_threshold":0.5}',))
    after = charts.rendered(sets=('config.async_training={"staleness_threshold":0.5}', change))
    assert rolled(before, after) == components
    configs = [get(objects, "ConfigMap", "demo-config")["data"] for objects in (before, after)]
    assert (configs[0] != configs[1]) == change.startswith(("config.", "kubernetes.")), (
        "the new value is there for who reads it live"
    )


@pytest.mark.parametrize(
    "change",
    [
        "autoscaling.maxReplicas=9",
        "kubernetes.scaleToZeroOnCompletion=true",
        'config.kubernetes={"recommendation":{"windows":5},"request_timeout_s":5}',
    ],
)
def test_no_pod_is_replaced_where_the_coordinator_follows(change: str) -> None:
    on = ("kubernetes.enabled=true", "monitoring.podMonitors.enabled=true", "rollouter.replicas=null")
    scaled = () if "scaleToZero" in change else ("autoscaling.enabled=true",)
    before, after = (charts.rendered(sets=(*on, *scaled, *more)) for more in ((), (change,)))
    assert rolled(before, after) == set()
    configs = [get(objects, "ConfigMap", "demo-config")["data"] for objects in (before, after)]
    assert configs[0] != configs[1]


def test_what_the_run_was_begun_with_cannot_change(tmp_path: Path) -> None:
    """Every one of these keys had another value: each is told."""
    before = installed()
    stored = get(before, "ConfigMap", "demo-config")["data"]
    config = yaml.safe_load(stored["config.yaml"])
    for key in FIXED:
        *sections, leaf = key.split(".")
        held = config
        for section in sections:
            held = held.setdefault(section, {})
        held[leaf] = f"the old {leaf}"
    stored["config.yaml"] = json.dumps(config)  # Helm quotes the key n, PyYAML does not
    with pytest.raises(HelmFailed) as refused:
        upgrade(before, tmp_path)
    for key in FIXED:
        assert f'config.{key}: was "the old {key.rpartition(".")[2]}" when' in str(refused.value)
    assert 'is "/model" now' in str(refused.value)
    assert "another release name" in str(refused.value)


def test_a_new_value_is_told_with_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(HelmFailed) as refused:
        upgrade(installed(), tmp_path, "config.seed=7", 'config.data.train_files=["/data/other"]')
    assert "config.seed: was null when the run was begun and is 7 now" in str(refused.value)
    assert 'was ["/data/train.parquet"] when the run was begun and is ["/data/other"] now' in str(
        refused.value
    )


HF = ('model.source="hf"', 'model.hf.repo="org/one"')
HOST = ('model.source="hostPath"', 'model.hostPath.path="/models/one"')
DEEP = ('model.mountPath="/models/one"', 'config.model.path="/models/one/two"')
DEMO = ('config.model.path="demo:spell_backward"', 'config.trainer.device="cpu"')


@pytest.mark.parametrize(
    ("begun", "change", "told"),
    [
        (HF, 'model.hf.repo="org/two"', 'repo: was "org/one" when the run was begun and is "org/two" now'),
        (HF, 'model.hf.revision="v2"', 'model.hf.revision: was "main" when'),
        (HF, 'model.source="pvc"', 'model.source: was "hf" when the run was begun and is "pvc" now'),
        ((), 'model.pvc.claimName="other"', 'model.pvc.claimName: was "headrace-model" when'),
        ((), 'model.pvc.subPath="other"', 'model.pvc.subPath: was "" when'),
        ((), 'model.source="image"', 'model.source: was "pvc" when'),
        (HOST, 'model.hostPath.path="/models/two"', 'model.hostPath.path: was "/models/one" when'),
        (DEMO, 'config.model.path="demo:long_tail"', 'config.model.path: was "demo:spell_backward" when'),
        (DEEP, 'model.mountPath="/models"', 'model.mountPath: was "/models/one" when'),
        ((), 'data.claimName="other"', 'data.claimName: was "headrace-data" when'),
        ((), 'data.claimName=""', 'data.claimName: was "headrace-data" when'),
        ((), 'data.mountPath="/elsewhere"', 'data.mountPath: was "/data" when'),
    ],
)
def test_another_model_under_the_same_path_is_refused(
    begun: tuple[str, ...], change: str, told: str, tmp_path: Path
) -> None:
    """And other data: the paths in the configuration stay the same, what lies there does not."""
    with pytest.raises(HelmFailed) as refused:
        upgrade(installed(begun), tmp_path, *begun, change)
    assert told in str(refused.value)
    assert str(refused.value).count("\n  - ") == 1


def test_what_holds_no_file_of_the_run_may_change(tmp_path: Path) -> None:
    """A claim that no file of the run lies on, and the keys of a source that is not used."""
    procedural = ('config.data.train_files="reasoning_gym:gsm_symbolic?size=10"',)
    before = installed(procedural)
    assert upgrade(before, tmp_path, *procedural, 'data.claimName=""', 'model.hf.repo="org/two"')


def test_a_release_of_before_is_not_held_to_what_it_did_not_note(tmp_path: Path) -> None:
    before = installed()
    annotations = get(before, "ConfigMap", "demo-config")["metadata"]["annotations"]
    for key in [key for key in annotations if key.startswith("headrace/")]:
        del annotations[key]
    assert upgrade(before, tmp_path, 'model.pvc.claimName="other"')


def test_redis_cannot_change(tmp_path: Path) -> None:
    with pytest.raises(HelmFailed) as refused:
        upgrade(installed(), tmp_path, 'redis.external.url="redis://elsewhere:6379/0"')
    assert 'config.redis.url: was null when the run was begun and is "redis://elsewhere:6379/0" now' in str(
        refused.value
    )


CLAIMS = {"data.claimName": "headrace-data", "model.pvc.claimName": "headrace-model"}


def volume_claim(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}}


def test_volumes_that_are_not_there_are_told(tmp_path: Path) -> None:
    """Pods would wait for them, and `helm --wait` for the pods. Told only where there is a cluster."""
    namespace = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "kube-root-ca.crt"},
        "data": {},
    }
    with pytest.raises(HelmFailed) as refused:
        upgrade([namespace], tmp_path, 'checkpoints.existingClaim="mine"')
    for key, claim in {**CLAIMS, "checkpoints.existingClaim": "mine"}.items():
        assert f"{key}: there is no volume claim {claim} in namespace tests" in str(refused.value)
    there = [namespace, *map(volume_claim, CLAIMS.values())]
    assert upgrade(there, tmp_path)
    assert upgrade([namespace], tmp_path, *DEMO), "which needs neither"
    made = f"extraObjects={json.dumps([volume_claim('headrace-data')])}"
    assert upgrade([namespace, volume_claim("headrace-model")], tmp_path, made), "with the release"


def test_lifetimes_are_those_of_the_configuration() -> None:
    assert manifests.LIFETIMES.read_text() == manifests.lifetimes(), "run `make manifests`"


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
