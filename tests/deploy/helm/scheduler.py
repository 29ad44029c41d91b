"""Kubernetes' default scheduler, as far as it decides where the pods of a run go.

Written from the behaviour of kube-scheduler 1.29 to 1.37 with its default profile: which nodes a pod fits
on (CPU, memory, GPUs, required affinities), what they score, with the plugins' own normalisation and weights,
chance among the best, and preemption by priority. Left out is what is equal on all nodes here: taints, node
affinity, volumes, ports. Below 100 nodes the scheduler looks at all of them, as this does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

HOSTNAME, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
WEIGHTS = {"spread": 2, "affinity": 2, "least_allocated": 1, "balanced": 1, "images": 1}
SYSTEM_SPREAD = ((HOSTNAME, 3), (ZONE, 5))
"""Topology key and skew of what holds for pods of a ReplicaSet that have no constraints of their own."""
IMAGE_BYTES = 10_000_000_000
_LEAST_IMAGE, _MOST_IMAGE = 23 * 2**20, 1000 * 2**20
_TOP = 100


@dataclass(eq=False)
class Pod:
    name: str
    labels: Mapping[str, str]
    selector: Mapping[str, str]
    """The labels by which its workload finds its pods."""
    needs: Mapping[str, float]
    """cpu (cores), memory (bytes), gpu."""
    affinity: Mapping[str, Any] = field(default_factory=dict)
    spread: Sequence[Mapping[str, Any]] = ()
    priority: int = 0
    image: str = ""

    def terms(self, sign: str, strength: str) -> list[tuple[int, Mapping[str, Any]]]:
        """(weight, term) of podAffinity or podAntiAffinity, `required` or `preferred`."""
        found = (self.affinity.get(sign) or {}).get(f"{strength}DuringSchedulingIgnoredDuringExecution") or []
        return [(t["weight"], t["podAffinityTerm"]) if strength == "preferred" else (1, t) for t in found]


@dataclass(eq=False)
class Node:
    name: str
    holds: Mapping[str, float]
    zone: str = ""
    images: frozenset[str] = frozenset()
    """Of an earlier run: a kubelet tells of a new one later than pods are placed."""
    pods: list[Pod] = field(default_factory=list)

    @cached_property
    def labels(self) -> dict[str, str]:
        zone = {ZONE: self.zone} if self.zone else {}
        return {HOSTNAME: self.name, "kubernetes.io/os": "linux", **zone}

    def used(self, what: str) -> float:
        return sum(pod.needs.get(what, 0.0) for pod in self.pods)

    def free(self, what: str) -> float:
        return self.holds.get(what, 0.0) - self.used(what)

    def has_room(self, pod: Pod) -> bool:
        return all(self.free(what) >= amount for what, amount in pod.needs.items())


@dataclass
class Scheduler:
    nodes: list[Node]
    chance: random.Random
    newer: bool = False
    """From 1.34 on, the balance of a node counts by what the pod changes of it."""

    def place(self, pod: Pod) -> bool:
        """Whether the pod has got a node."""
        fitting = [node for node in self.nodes if node.has_room(pod) and self._admits(node, pod)]
        if not fitting:
            return False
        self._best(pod, fitting).pods.append(pod)
        return True

    def preempt(self, pod: Pod) -> list[Pod]:
        """Pods of lower priority that give way to it, the fewest; it has their room then. None: it waits."""
        best: tuple[list[Pod], Node] | None = None
        for node in self.nodes:
            lower = sorted((p for p in node.pods if p.priority < pod.priority), key=lambda p: -p.priority)
            victims = list(lower)
            for victim in victims:
                node.pods.remove(victim)
            fits = node.has_room(pod) and self._admits(node, pod)
            for victim in lower if fits else ():
                node.pods.append(victim)
                if node.has_room(pod):
                    victims.remove(victim)
                else:
                    node.pods.remove(victim)
            node.pods += victims
            if fits and (best is None or len(victims) < len(best[0])):
                best = victims, node
        if best is None:
            return []
        for victim in best[0]:
            best[1].pods.remove(victim)
        best[1].pods.append(pod)
        return best[0]

    # -- filter ----------------------------------------------------------------------------------

    def _admits(self, node: Node, pod: Pod) -> bool:
        return all(self._near(node, term) for _, term in pod.terms("podAffinity", "required")) and not any(
            self._near(node, term) for _, term in pod.terms("podAntiAffinity", "required")
        )

    def _near(self, node: Node, term: Mapping[str, Any]) -> bool:
        """Whether a pod of the term is in the node's topology domain."""
        key = term["topologyKey"]
        return key in node.labels and any(
            matches(term.get("labelSelector"), other.labels)
            for one in self.nodes
            if one.labels.get(key) == node.labels[key]
            for other in one.pods
        )

    # -- score -----------------------------------------------------------------------------------

    def _best(self, pod: Pod, fitting: Sequence[Node]) -> Node:
        scores = {
            "spread": self._spread(pod, fitting),
            "affinity": self._affinity(pod, fitting),
            "least_allocated": [_least_allocated(pod, node) for node in fitting],
            "balanced": [_balanced(pod, node, self.newer) for node in fitting],
            "images": [self._images(pod, node) for node in fitting],
        }
        total = [sum(WEIGHTS[name] * found[n] for name, found in scores.items()) for n in range(len(fitting))]
        return self.chance.choice(
            [node for node, score in zip(fitting, total, strict=True) if score == max(total)]
        )

    def _affinity(self, pod: Pod, fitting: Sequence[Node]) -> list[int]:
        """Preferred terms of the pod and of those that are there, by weight: 0 to 100 at the extremes."""
        domains: dict[tuple[str, str], int] = {}
        for node in self.nodes:
            for other in node.pods:
                for owner, about in ((pod, other), (other, pod)):
                    for key, weight in _preferred(owner, about):
                        if key in node.labels:
                            at = key, node.labels[key]
                            domains[at] = domains.get(at, 0) + weight
                for _, term in other.terms("podAffinity", "required"):
                    if term["topologyKey"] in node.labels and matches(term.get("labelSelector"), pod.labels):
                        at = term["topologyKey"], node.labels[term["topologyKey"]]
                        domains[at] = domains.get(at, 0) + 1
        if not domains:
            return [0] * len(fitting)
        raw = [sum(domains.get(at, 0) for at in node.labels.items()) for node in fitting]
        least, most = min(raw), max(raw)
        return [int(_TOP * ((one - least) / (most - least))) if most > least else 0 for one in raw]

    def _spread(self, pod: Pod, fitting: Sequence[Node]) -> list[int]:
        """Soft constraints: the fewer pods of the kind in a domain, the better."""
        own = [c for c in pod.spread if c["whenUnsatisfiable"] == "ScheduleAnyway"]
        constraints = [(c["topologyKey"], c["maxSkew"], c.get("labelSelector")) for c in own]
        if not pod.spread:
            constraints = [(key, skew, {"matchLabels": pod.selector}) for key, skew in SYSTEM_SPREAD]
        if not constraints:
            return [0] * len(fitting)
        raw: list[int] = []
        for node in fitting:
            score = 0.0
            for key, skew, selector in constraints:
                if key not in node.labels:
                    continue
                count = sum(
                    matches(selector, other.labels)
                    for one in self.nodes
                    if one.labels.get(key) == node.labels[key]
                    for other in one.pods
                )
                domains = len({one.labels.get(key, "") for one in fitting})
                score += count * math.log(domains + 2) + skew - 1
            raw.append(round(score))
        least, most = min(raw), max(raw)
        return [_TOP * (most + least - one) // most if most else _TOP for one in raw]

    def _images(self, pod: Pod, node: Node) -> int:
        """Of large images, the more nodes have them the more it counts."""
        if pod.image not in node.images:
            return 0
        share = sum(pod.image in one.images for one in self.nodes) / len(self.nodes)
        size = min(max(IMAGE_BYTES * share, _LEAST_IMAGE), _MOST_IMAGE)
        return int(_TOP * (size - _LEAST_IMAGE) / (_MOST_IMAGE - _LEAST_IMAGE))


def _preferred(owner: Pod, about: Pod) -> Iterator[tuple[str, int]]:
    for sign, factor in (("podAffinity", 1), ("podAntiAffinity", -1)):
        for weight, term in owner.terms(sign, "preferred"):
            if matches(term.get("labelSelector"), about.labels):
                yield term["topologyKey"], factor * weight


def _least_allocated(pod: Pod, node: Node) -> int:
    def one(what: str) -> int:
        return int(max(0.0, node.free(what) - pod.needs[what]) * _TOP / node.holds[what])

    return (one("cpu") + one("memory")) // 2


def _balanced(pod: Pod, node: Node, newer: bool) -> int:
    def score(more: float) -> int:
        cpu, memory = (
            min(1.0, (node.used(what) + more * pod.needs[what]) / node.holds[what])
            for what in ("cpu", "memory")
        )
        return int((1 - abs(cpu - memory) / 2) * _TOP)

    if not newer:
        return score(1.0)
    half = _TOP // 2
    return half + (half + score(1.0) - score(0.0)) // 2


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a selector takes these labels; none takes none."""
    if selector is None:
        return False
    wanted = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return wanted and all(_expression(e, labels) for e in selector.get("matchExpressions") or [])


def _expression(e: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    match e["operator"]:
        case "In":
            return labels.get(e["key"]) in e["values"]
        case "NotIn":
            return labels.get(e["key"]) not in e["values"]
        case "Exists":
            return e["key"] in labels
        case "DoesNotExist":
            return e["key"] not in labels
    raise ValueError(f"no operator {e['operator']}")


@dataclass
class Queue:
    """Pods that wait for a node, the most important first, and what becomes of them."""

    scheduler: Scheduler
    patient: bool
    """One that found no node waits until the others have been tried, as a back-off of seconds makes it. Else
    anything may happen in any order, within a priority."""

    def settle(self, pods: Sequence[Pod]) -> list[Pod]:
        """Those that stay pending when nothing changes any more. `pods` in the order of their creation."""
        chance = self.scheduler.chance
        waiting, refused = list(pods), list[Pod]()
        moved = True
        while waiting or (refused and moved):
            if not waiting:
                waiting, refused, moved = refused, [], False
                chance.shuffle(waiting)
            top = max(pod.priority for pod in waiting)
            first = [pod for pod in waiting if pod.priority == top]
            pod = first[0] if self.patient else chance.choice(first)
            waiting.remove(pod)
            if self.scheduler.place(pod):
                moved = True
            elif victims := self.scheduler.preempt(pod):
                refused += victims
                moved = True
            else:
                refused.append(pod)
                continue
            if not self.patient:
                waiting, refused = [*waiting, *refused], []
        return refused
