"""Which role installs what: the chart reads and makes what a user of one namespace may read and make there.

Rights are those of Kubernetes' own ClusterRoles (its bootstrap policy, 1.29 to 1.37), bound in the namespace.
A lookup that the API refuses is an error, which no template can catch.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.kube_tools import ROOT, HelmFailed
from tests.deploy.helm import charts, leader_worker_set
from tests.deploy.helm.objects import Object, of_kind
from tests.deploy.helm.test_presets import CUSTOM
from tests.deploy.helm.test_upgrades import get, installed, upgrade

EDIT = {
    *("ConfigMap", "Secret", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod"),
    *("Deployment", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget"),
}
"""Kinds that `edit` reads and writes, of those in the chart."""
ADMIN = {*EDIT, "Role", "RoleBinding"}
ADMIN_RIGHTS = {
    ("", "pods"): {"get", "list", "watch", "patch"},
    ("", "events"): {"get", "list", "watch", "create", "patch"},
    ("apps", "deployments"): {"get", "list", "watch", "patch"},
    ("apps", "deployments/scale"): {"get", "list", "watch", "patch"},
}
"""Of what the coordinator is given: nobody may give a right that he does not have."""
SET = 'trainer.workload="leaderWorkerSet"'
NAMESPACE = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "kube-root-ca.crt"},
    "data": {},
}


def lookups() -> list[tuple[str, str]]:
    """API and kind of each lookup in the templates, comments apart."""
    found: list[tuple[str, str]] = []
    for path in sorted((charts.CHART / "templates").rglob("*")):
        if path.is_file():
            text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
            here = re.findall(r'lookup "(\S+)" "(\S+)"', text)
            assert len(here) == len(re.findall(r"\blookup\b", text)), f"{path.name}: of which kind?"
            found += here
    return found


def claims() -> list[Object]:
    names = ("headrace-data", "headrace-model")
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": n}} for n in names]


def test_every_lookup_is_of_what_an_editor_reads() -> None:
    """But for the LeaderWorkerSet, which is looked for where the release has or had one."""
    found = lookups()
    assert len(found) >= 6
    assert {what for what in found if what[1] not in EDIT} == {
        (leader_worker_set.API_VERSION, "LeaderWorkerSet")
    }


@pytest.mark.parametrize(
    ("role", "sets"),
    [(EDIT, ()), (EDIT, ("rollouter.replicas=3",)), (ADMIN, ("kubernetes.enabled=true",))],
    ids=["edit", "edit, fixed number", "admin"],
)
def test_a_user_of_one_namespace_installs_and_upgrades(
    role: set[str], sets: tuple[str, ...], tmp_path: Path
) -> None:
    """The API of LeaderWorkerSets is there, and not his."""
    first = upgrade([NAMESPACE, *claims()], tmp_path, *sets, readable=role)
    assert get(first, "Deployment", "demo-trainer")
    before = [NAMESPACE, *claims(), *installed(sets)]
    again = upgrade(before, tmp_path, *sets, readable=role)
    assert get(again, "Secret", "demo-auth")["data"] == get(before, "Secret", "demo-auth")["data"]


def test_a_set_is_looked_for_by_who_may_have_it(tmp_path: Path) -> None:
    both = {*EDIT, "LeaderWorkerSet"}
    before = installed((SET,))
    assert upgrade(before, tmp_path, SET, readable=both)
    with pytest.raises(HelmFailed, match="leaderworkerset/demo-trainer is on"):
        upgrade(before, tmp_path, readable=both)
    with pytest.raises(HelmFailed, match="leaderworkersets is forbidden"):
        upgrade(before, tmp_path, readable=EDIT)


@pytest.mark.parametrize("preset", charts.ALL)
def test_an_editor_makes_all_but_what_is_asked_for(preset: str) -> None:
    objects = charts.rendered(preset)
    others = {thing["kind"] for thing in objects} - EDIT
    roles = others & {"Role", "RoleBinding"}
    assert roles in (set(), {"Role", "RoleBinding"})
    assert others - ADMIN <= {*CUSTOM, "PriorityClass"}, "an operator's kinds, or a cluster administrator's"
    config = get(objects, "ConfigMap", "demo-config")["data"]["config.yaml"]
    assert bool(roles) == ("rollouter_deployment" in config), "with kubernetes.enabled"


@pytest.mark.parametrize("sets", [(), (SET,)], ids=["deployment", "set"])
def test_an_admin_gives_the_coordinator_what_he_has(sets: tuple[str, ...]) -> None:
    (role,) = of_kind(charts.rendered(sets=("kubernetes.enabled=true", *sets)), "Role")
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                if group == "leaderworkerset.x-k8s.io":
                    continue
                assert set(rule["verbs"]) <= ADMIN_RIGHTS[group, resource]


def test_the_page_says_so() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    table = page.split("| who | installs |")[1].split("\n\n")[0]
    edit, admin = (
        next(line for line in table.splitlines() if f"`{role}`" in line) for role in ("edit", "admin")
    )
    assert "`kubernetes.enabled`" in admin
    assert "`kubernetes.enabled`" not in edit
    for kind in sorted(set(CUSTOM) - {"Certificate"}):
        assert kind in table
    assert "PriorityClass" in table
