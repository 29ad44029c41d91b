"""Rendered objects: read from YAML, and the pods in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

Object = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Pod")


def read(text: str) -> list[Object]:
    return [
        document
        for document in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if document
    ]


def name_of(thing: Object) -> str:
    return f"{thing['kind']} {thing['metadata']['name']}"


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [thing for thing in objects if thing["kind"] in kinds]


@dataclass(frozen=True)
class Pod:
    """A pod as its workload makes it."""

    owner: Object
    labels: Mapping[str, str]
    spec: dict[str, Any]

    @property
    def name(self) -> str:
        return name_of(self.owner)

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def port_names(self) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for c in self.containers for p in c.get("ports", [])}


def pods(objects: Sequence[Object]) -> Iterator[Pod]:
    for thing in of_kind(objects, *WORKLOADS):
        if thing["kind"] == "Pod":
            yield Pod(thing, thing["metadata"]["labels"], thing["spec"])
        else:
            spec = thing["spec"]
            template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
            yield Pod(thing, template["metadata"]["labels"], template["spec"])


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector (matchLabels only) takes these labels; an empty one takes all."""
    wanted = (selector or {}).get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items())
