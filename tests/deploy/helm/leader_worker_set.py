"""LeaderWorkerSet, version v1 of its API, as far as a schema of it would check: no schema of it is at hand.

Written from the types of the API (`leaderworkerset.x-k8s.io/v1`): allowed keys, their types and words, and
what its admission webhook refuses. The template of the pods is Kubernetes' own: `pod_template` wraps it for
its schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.deploy.helm.objects import Object, name_of

API_VERSION = "leaderworkerset.x-k8s.io/v1"
Shape = Mapping[str, Any]
"""Keys, each with a type, a tuple of words, a shape, or `object` for what is checked elsewhere."""
_COUNT_OR_SHARE = (int, str)
SPEC: Shape = {
    "replicas": int,
    "startupPolicy": ("LeaderCreated", "LeaderReady"),
    "rolloutStrategy": {
        "type": ("RollingUpdate",),
        "rollingUpdateConfiguration": {
            "partition": int,
            "maxUnavailable": _COUNT_OR_SHARE,
            "maxSurge": _COUNT_OR_SHARE,
        },
    },
    "networkConfig": {"subdomainPolicy": ("Shared", "UniquePerReplica")},
    "leaderWorkerTemplate": {
        "size": int,
        "restartPolicy": ("None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "Default"),
        "leaderTemplate": object,
        "workerTemplate": object,
        "subGroupPolicy": {"subGroupPolicyType": ("LeaderWorker", "LeaderExcluded"), "subGroupSize": int},
        "volumeClaimTemplates": list,
        "persistentVolumeClaimRetentionPolicy": object,
    },
}


def violations(thing: Object) -> Iterator[str]:
    """What its API would refuse."""
    who = name_of(thing)
    yield from (f"{who}: no key {key}" for key in set(thing) - {"apiVersion", "kind", "metadata", "spec"})
    if thing["apiVersion"] != API_VERSION:
        yield f"{who}: apiVersion {thing['apiVersion']}"
    yield from _shaped(f"{who}: spec", thing["spec"], SPEC)
    template = thing["spec"].get("leaderWorkerTemplate")
    if not isinstance(template, Mapping):
        return
    if "workerTemplate" not in template:
        yield f"{who}: spec.leaderWorkerTemplate.workerTemplate is missing"
    if template.get("size", 1) < 1 or thing["spec"].get("replicas", 1) < 0:
        yield f"{who}: a group has one pod or more, and no set less than none"
    rolling = thing["spec"].get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {})
    if rolling.get("maxSurge", 0) in (0, "0%") and rolling.get("maxUnavailable", 1) in (0, "0%"):
        yield f"{who}: maxSurge and maxUnavailable are both 0: nothing could be updated"


def _shaped(where: str, value: Any, shape: Any) -> Iterator[str]:
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            yield f"{where}: {value!r} is no map"
            return
        for key, found in value.items():
            if key in shape:
                yield from _shaped(f"{where}.{key}", found, shape[key])
            else:
                yield f"{where}: no key {key}"
    elif isinstance(shape, tuple) and all(isinstance(word, str) for word in shape):
        if value not in shape:
            yield f"{where}: {value!r} is none of {', '.join(shape)}"
    elif not isinstance(value, shape) or isinstance(value, bool):
        yield f"{where}: {value!r} is of another type"


def pod_template(thing: Object) -> Object:
    """Its pods' template, as an object for which there are schemas."""
    template = thing["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
