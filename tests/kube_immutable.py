"""What a Kubernetes API server refuses to change in an object that is there, for the kinds in the chart.

From the validation of updates in Kubernetes 1.29 to 1.37 and, for LeaderWorkerSets, of its webhook. What the
server fills in by itself (defaults, a claim's class, a Service's address) is not compared: a field that a new
object leaves out stays what it is, as it does for who applies on the server and has not set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.deploy.helm.pitfalls import quantity

Object = dict[str, Any]
_CHANGING: Mapping[str, tuple[str, ...]] = {
    "StatefulSet": (
        *("replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit"),
        *("persistentVolumeClaimRetentionPolicy", "minReadySeconds"),
    ),
    "PersistentVolumeClaim": ("resources", "volumeAttributesClassName"),
}
"""Keys of a spec that may change, where most may not."""
_FIXED: Mapping[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "Service": ("spec.clusterIP", "spec.clusterIPs"),
    "RoleBinding": ("roleRef",),
    "Secret": ("type",),
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate.subGroupPolicy", "spec.networkConfig"),
    "PriorityClass": ("value", "preemptionPolicy"),
}
"""Fields that may not, where most may."""


def _storage(claim: Object) -> float:
    asked = claim["spec"]["resources"]["requests"]["storage"]
    found = quantity(asked)
    assert found is not None, f"{asked!r} is no quantity"
    return found


def violations(old: Object, new: Object, expandable: bool = True) -> list[str]:
    """One sentence for each field that may not change. `expandable`: the claim's class lets it grow."""
    kind = new["kind"]
    found = [
        f"{path}: field is immutable"
        for path in _FIXED.get(kind, ())
        if _at(new, path) is not None and _at(new, path) != _at(old, path)
    ]
    if kind in ("ConfigMap", "Secret") and old.get("immutable"):
        found.append("data: field is immutable when `immutable` is set")
    if kind in _CHANGING:
        was, now = old["spec"], new["spec"]
        for key in sorted({*was, *now} - set(_CHANGING[kind])):
            if key in now and _plain(now[key]) != _plain(was.get(key)):
                found.append(f"spec.{key}: Forbidden: may not be changed")
    if kind == "PersistentVolumeClaim":
        was, now = _storage(old), _storage(new)
        if now < was:
            found.append("spec.resources.requests.storage: Forbidden: may not be less than before")
        if now > was and not expandable:
            found.append("spec.resources.requests.storage: Forbidden: the storage class does not let it grow")
    if kind == "Pod":
        was, now = ({k: v for k, v in o["spec"].items() if k != "tolerations"} for o in (old, new))
        if _plain(was) != _plain(now):
            found.append("spec: Forbidden: pod updates may not change it")
    return found


def _at(thing: Object, path: str) -> Any:
    found: Any = thing
    for key in path.split("."):
        found = (found or {}).get(key)
    return found


def _plain(value: Any) -> Any:
    """Quantities as numbers, so that 1Gi is 1024Mi."""
    if isinstance(value, Mapping):
        return {k: quantity(v) if k == "storage" else _plain(v) for k, v in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
