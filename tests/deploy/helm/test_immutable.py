"""Upgrades that the API server would refuse half way: the chart refuses them first, and what it prints helps.

Helm writes the ConfigMap, which a running coordinator follows, before it comes to what cannot change.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.kube_tools import HelmFailed, kubectl
from tests import kube_immutable
from tests.deploy.helm import charts
from tests.deploy.helm.objects import Object, name_of, of_kind
from tests.deploy.helm.test_upgrades import get, installed, upgrade
from tests.kube_api import NAMESPACE, ApiError, KubeApi

BEGUN = ('checkpoints.storageClassName="fast"', 'redis.persistence.storageClassName="fast"')
REFUSED = [
    ('redis.persistence.size="128Gi"', "redis.persistence.size: was 64Gi and is 128Gi now"),
    (
        'redis.persistence.size="32Gi"',
        "redis.persistence.size: was 64Gi and is 32Gi now, and no volume shrinks",
    ),
    (
        'redis.persistence.storageClassName="slow"',
        'redis.persistence.storageClassName: was "fast" and is "slow" now',
    ),
    ('redis.persistence.storageClassName=""', 'redis.persistence.storageClassName: was "fast" and is "" now'),
    ('checkpoints.size="400Gi"', "the claim demo-checkpoints has 500Gi, and no volume shrinks to 400Gi"),
    ('checkpoints.size="1Ti"', "only its storage class knows whether it grows to 1Ti"),
    (
        'checkpoints.accessModes=["ReadWriteMany"]',
        'has ["ReadWriteOnce"], which does not change to ["ReadWriteMany"]',
    ),
    ('checkpoints.storageClassName="slow"', 'is of "fast", which does not change to "slow"'),
]
"""Values that reach a field which does not change, and what the chart says of them."""
REACHED = {
    ("StatefulSet demo-redis", "spec.volumeClaimTemplates"),
    ("PersistentVolumeClaim demo-checkpoints", "spec.accessModes"),
    ("PersistentVolumeClaim demo-checkpoints", "spec.resources.requests.storage"),
    ("PersistentVolumeClaim demo-checkpoints", "spec.storageClassName"),
}
"""Every field that does not change and that a value can reach: the chart looks after each."""


def refused_by_the_api(
    before: list[Object], after: list[Object], expandable: bool = True
) -> set[tuple[str, str]]:
    """(object, field) of what an upgrade from one to the other would be refused for."""
    there = {name_of(thing): thing for thing in before}
    return {
        (name_of(thing), problem.split(":")[0])
        for thing in after
        if name_of(thing) in there and "helm.sh/hook" not in thing["metadata"].get("annotations", {})
        for problem in kube_immutable.violations(there[name_of(thing)], thing, expandable)
    }


@pytest.mark.parametrize(("change", "told"), REFUSED, ids=[change for change, _ in REFUSED])
def test_what_cannot_change_is_refused_before_anything_changes(
    change: str, told: str, tmp_path: Path
) -> None:
    before = installed(BEGUN)
    with pytest.raises(HelmFailed) as refused:
        upgrade(before, tmp_path, *BEGUN, change)
    assert told in str(refused.value)
    assert str(refused.value).count("\n  - ") == 1
    after = charts.rendered(sets=(*BEGUN, change))
    assert refused_by_the_api(before, after, expandable=False), "not for nothing"


def test_a_size_in_other_words_is_the_same(tmp_path: Path) -> None:
    same = ('redis.persistence.size="65536Mi"', 'checkpoints.size="536870912000"')
    before = installed(BEGUN)
    assert refused_by_the_api(before, upgrade(before, tmp_path, *BEGUN, *same)) == set()


def test_no_class_is_the_same_as_an_empty_one(tmp_path: Path) -> None:
    none = ("checkpoints.storageClassName=null", "redis.persistence.storageClassName=null")
    assert upgrade(installed(), tmp_path, *none)
    with pytest.raises(HelmFailed, match='was "fast" and is "" now'):
        upgrade(installed(BEGUN), tmp_path, *none)


def test_the_class_that_a_cluster_gave_stays(tmp_path: Path) -> None:
    """An admission plugin names it where the claim names none; and a name that is taken back stays, too."""
    before = installed()
    claim = get(before, "PersistentVolumeClaim", "demo-checkpoints")
    claim["spec"]["storageClassName"] = "standard"
    after = get(upgrade(before, tmp_path), "PersistentVolumeClaim", "demo-checkpoints")
    assert after["spec"]["storageClassName"] == "standard"
    begun = installed(BEGUN)
    after = get(upgrade(begun, tmp_path, BEGUN[1]), "PersistentVolumeClaim", "demo-checkpoints")
    assert after["spec"]["storageClassName"] == "fast"


@pytest.mark.parametrize("preset", charts.PRESETS)
def test_no_other_value_reaches_what_does_not_change(preset: str) -> None:
    """From the defaults to a preset and back: selectors, Services, bindings and claims stay what they are."""
    one, two = charts.rendered(), charts.rendered(preset)
    found = refused_by_the_api(one, two, expandable=False) | refused_by_the_api(two, one, expandable=False)
    assert found <= REACHED


def test_the_volume_of_a_redis_elsewhere_is_nobodys_matter(tmp_path: Path) -> None:
    outside = ('redis.external.url="redis://elsewhere:6379/0"',)
    assert upgrade(installed(outside), tmp_path, *outside, 'redis.persistence.size="1Gi"')
    mine = ('checkpoints.existingClaim="mine"',)
    assert upgrade(installed(mine), tmp_path, *mine, 'checkpoints.size="1Gi"')


# -- what the messages say to do ----------------------------------------------------------------------


def with_spec(changes: Object) -> Callable[[Object], Object]:
    return lambda old: old | {"spec": old["spec"] | changes}


class Live:
    """The release's volumes and the StatefulSet in a cluster, on which kubectl does what a message says."""

    def __init__(self, folder: Path) -> None:
        self.api, self.folder = KubeApi(), folder
        (folder / "kube").write_text(self.api.kubeconfig())
        self.others = installed()
        for kind in ("StatefulSet", "PersistentVolumeClaim"):
            for thing in of_kind(self.others, kind):
                self.api.create(f"{kind.lower()}s", thing)
                self.others.remove(thing)
        (template,) = self.api.get("statefulsets", "demo-redis")["spec"]["volumeClaimTemplates"]
        claim = {"metadata": {"name": "data-demo-redis-0"}, "spec": template["spec"]}
        self.api.create("persistentvolumeclaims", claim)

    def upgrade(self, *sets: str) -> None:
        """As Helm: refused by the chart, or written object by object."""
        live = [
            o for kind in ("statefulsets", "persistentvolumeclaims") for o in self.api.objects[kind].values()
        ]
        for thing in of_kind(
            upgrade([*self.others, *live], self.folder, *sets), "StatefulSet", "PersistentVolumeClaim"
        ):
            kind, name = f"{thing['kind'].lower()}s", thing["metadata"]["name"]
            if name in self.api.objects[kind]:
                self.api.update(kind, name, with_spec(thing["spec"]))
            else:
                self.api.create(kind, thing)

    def follow(self, message: str) -> int:
        """Run the commands of a message; the exit status of the first that fails."""
        commands = re.findall(r"`(kubectl [^`]+)`", message)
        assert commands
        for command in commands:
            _, *words = shlex.split(command.replace("-n tests", f"-n {NAMESPACE}"))
            done = subprocess.run(
                [kubectl(), *words],
                env={"KUBECONFIG": str(self.folder / "kube"), "HOME": str(self.folder)},
                timeout=60,
                check=False,
            )
            if done.returncode:
                return done.returncode
        return 0

    def size(self, claim: str) -> str:
        found: str = self.api.get("persistentvolumeclaims", claim)["spec"]["resources"]["requests"]["storage"]
        return found


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    found = Live(tmp_path)
    yield found
    found.api.close()


def test_the_volume_of_the_ledger_grows_as_the_message_says(live: Live) -> None:
    larger = 'redis.persistence.size="128Gi"'
    with pytest.raises(HelmFailed) as refused:
        live.upgrade(larger)
    assert live.follow(str(refused.value)) == 0
    live.upgrade(larger)
    assert live.size("data-demo-redis-0") == "128Gi"
    (template,) = live.api.get("statefulsets", "demo-redis")["spec"]["volumeClaimTemplates"]
    assert template["spec"]["resources"]["requests"]["storage"] == "128Gi"
    assert any("propagationPolicy" in body for body in live.api.deletions), "its pod stays"


def test_the_volume_of_checkpoints_grows_as_the_message_says(live: Live) -> None:
    larger = 'checkpoints.size="1Ti"'
    with pytest.raises(HelmFailed) as refused:
        live.upgrade(larger)
    assert live.follow(str(refused.value)) == 0
    live.upgrade(larger)
    assert live.size("demo-checkpoints") == "1Ti"
    with pytest.raises(HelmFailed, match="set it to 1Ti"):
        live.upgrade()


def test_a_volume_that_does_not_grow_changes_nothing(live: Live) -> None:
    live.api.expandable = False
    larger = 'checkpoints.size="1Ti"'
    with pytest.raises(HelmFailed) as refused:
        live.upgrade(larger)
    assert live.follow(str(refused.value)) != 0
    with pytest.raises(HelmFailed):
        live.upgrade(larger)
    live.upgrade()
    assert live.size("demo-checkpoints") == "500Gi"


def test_a_claim_of_ones_own_takes_the_place(live: Live) -> None:
    """Where access modes or class have to be others."""
    shared = 'checkpoints.accessModes=["ReadWriteMany"]'
    with pytest.raises(HelmFailed, match=r"name that in checkpoints\.existingClaim"):
        live.upgrade(shared)
    live.upgrade(shared, 'checkpoints.existingClaim="mine"')


def test_the_api_holds_them_to_it(live: Live) -> None:
    """The fake one, by the rules of the real one."""
    for kind, name, key, value in [
        ("statefulsets", "demo-redis", "serviceName", "other"),
        ("statefulsets", "demo-redis", "selector", {"matchLabels": {"a": "b"}}),
        ("persistentvolumeclaims", "demo-checkpoints", "accessModes", ["ReadWriteMany"]),
    ]:
        with pytest.raises(ApiError, match=f"spec.{key}: Forbidden"):
            live.api.update(kind, name, with_spec({key: value}))
