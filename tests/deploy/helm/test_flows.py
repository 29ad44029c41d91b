"""Network policies let through what flows.yaml lists and nothing else; docs/security.md shows that table."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml

from scripts.kube_tools import ROOT
from tests.deploy.helm import charts, pitfalls
from tests.deploy.helm.objects import Object, Pod, matches, of_kind, pods

TABLE: dict[str, Any] = yaml.safe_load((charts.CHART / "flows.yaml").read_text())
OUTSIDE = {
    "dns": ({"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"}),
    "prometheus": ({"kubernetes.io/metadata.name": "monitoring"}, {"app": "prometheus"}),
    "stranger": ({"kubernetes.io/metadata.name": "other"}, {"app": "anything"}),
    "neighbour": ({"kubernetes.io/metadata.name": "tests"}, {"app": "anything"}),
}
"""Labels of a namespace and of a pod in it. The neighbour lives in the release's own namespace."""
EPHEMERAL = (32768, 60999)
Connection = tuple[str, str, int]


def open_ports(rule: dict[str, Any]) -> Iterator[tuple[int, int]]:
    for port in rule["ports"]:
        yield port["port"], port.get("endPort", port["port"])


def peer_is(peer: dict[str, Any], namespace: dict[str, str], labels: dict[str, str], ours: bool) -> bool:
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        return matches(peer["namespaceSelector"], namespace) and matches(peer.get("podSelector"), labels)
    return ours and matches(peer["podSelector"], labels)


@pytest.mark.parametrize(
    ("url", "port", "opened"),
    [
        ("rediss://redis.data.svc:6380/3", None, 6380),
        ("redis://user@[fd00::1]:7000/0?protocol=3", None, 7000),
        ("redis://redis.data.svc/0", None, 6379),
        # A Service that forwards to another port: policies see the pod's.
        ("redis://redis.data.svc:6380/0", 6379, 6379),
    ],
)
def test_the_port_of_an_external_redis_is_the_urls(url: str, port: int | None, opened: int) -> None:
    sets = [f"redis.external.url={json.dumps(url)}"]
    if port is not None:
        sets.append(f"networkPolicy.externalRedis.port={port}")
    objects = charts.rendered(sets=tuple(sets))
    for component in ("rollouter", "trainer", "queue", "coordinator"):
        (policy,) = [
            p for p in of_kind(objects, "NetworkPolicy") if p["metadata"]["name"] == f"demo-{component}"
        ]
        outside = [r for r in policy["spec"]["egress"] if any("ipBlock" in peer for peer in r["to"])]
        assert [p["port"] for rule in outside for p in rule["ports"]] == [opened], component


class World:
    """The pods of a release and some others, and what the policies let them do."""

    def __init__(self, objects: Sequence[Object]) -> None:
        self.policies = [p["spec"] for p in of_kind(objects, "NetworkPolicy")]
        self.places = {pod.component: (OUTSIDE["neighbour"][0], dict(pod.labels)) for pod in pods(objects)}
        self.ours = {*self.places, "neighbour"}
        self.places |= OUTSIDE

    def _side(self, who: str, other: str, port: int, way: str, peers: str) -> bool:
        """Whether the policies of `who` allow the connection; `way` is Ingress or Egress."""
        _, labels = self.places[who]
        if who in OUTSIDE:
            return True  # nobody's policies but ours are known
        about = [p for p in self.policies if matches(p["podSelector"], labels) and way in p["policyTypes"]]
        if not about:
            return True  # what no policy is about is open
        namespace, others = self.places[other]
        return any(
            any(peer_is(peer, namespace, others, other in self.ours) for peer in rule[peers])
            and any(low <= port <= high for low, high in open_ports(rule))
            for policy in about
            for rule in policy.get(way.lower(), [])
        )

    def allows(self, source: str, target: str, port: int) -> bool:
        return self._side(source, target, port, "Egress", "to") and self._side(
            target, source, port, "Ingress", "from"
        )


def wanted(conditions: set[str], places: set[str]) -> set[tuple[str, str, tuple[int, int]]]:
    """What the table lists between places that are known, as (from, to, range of ports)."""
    found = set()
    for flow in TABLE["flows"]:
        if flow.get("when") and flow["when"] not in conditions:
            continue
        for source in flow["from"]:
            if source in places and flow["to"] in places:
                port = flow["port"]
                if port == "ephemeral":
                    ports = EPHEMERAL
                elif isinstance(port, int):
                    ports = (port, port)
                else:
                    ports = (TABLE["ports"][flow["to"]][port],) * 2
                found.add((source, flow["to"], ports))
    return found


@pytest.mark.parametrize(
    ("preset", "conditions"),
    [
        ("defaults", {"bundledRedis"}),
        ("ci/external-redis.yaml", {"externalRedis"}),
        ("ci/keda.yaml", {"bundledRedis"}),
    ],
)
def test_what_is_listed_passes_and_nothing_else(preset: str, conditions: set[str]) -> None:
    world = World(charts.rendered(preset))
    flows = wanted(conditions, set(world.places))
    probes = {port for component in TABLE["ports"].values() for port in component.values()}
    probes |= {22, 53, 80, 443, *EPHEMERAL, EPHEMERAL[0] - 1, EPHEMERAL[1] + 1}
    inside = set(world.places) - set(OUTSIDE)
    for source, target in itertools.product(world.places, repeat=2):
        if not {source, target} & inside:
            continue
        for port in probes:
            listed = any(s == source and t == target and low <= port <= high for s, t, (low, high) in flows)
            assert world.allows(source, target, port) == listed, f"{source} to {target}, port {port}"


def blocks(preset: str, component: str, sets: tuple[str, ...] = ()) -> dict[str, set[int]]:
    """Ranges of addresses that a component may reach, with their ports."""
    (policy,) = [
        p
        for p in of_kind(charts.rendered(preset, sets=sets), "NetworkPolicy")
        if p["metadata"]["name"] == f"demo-{component}"
    ]
    return {
        peer["ipBlock"]["cidr"]: {port["port"] for port in rule["ports"]}
        for rule in policy["spec"]["egress"]
        for peer in rule["to"]
        if "ipBlock" in peer
    }


def test_conditions_open_what_they_say() -> None:
    for component in ("rollouter", "trainer", "queue", "coordinator"):
        assert blocks("defaults", component) == {}
        assert blocks("ci/external-redis.yaml", component) == {"10.20.0.0/16": {6380}}
    assert blocks("ci/keda.yaml", "coordinator") == {"0.0.0.0/0": {443, 6443}, "::/0": {443, 6443}}
    assert blocks("ci/keda.yaml", "rollouter") == {}
    assert blocks("ci/everything.yaml", "queue") == {
        "0.0.0.0/0": {443},
        "::/0": {443},
        "10.9.0.0/16": {8443},
    }
    clients = World(charts.rendered("ci/everything.yaml"))
    clients.places["stranger"] = ({"team": "rl"}, {})
    assert clients.allows("stranger", "queue", 8000)
    assert not clients.allows("stranger", "rollouter", 8100)


def test_dns_may_listen_elsewhere() -> None:
    """Policies see the port of its pods: OpenShift's have 5353, and a Service with 53 before them."""
    sets = (
        'networkPolicy.dns={"ports":[53,5353],"podSelector":{"matchLabels":{"k8s-app":null,"of":"openshift"}}}',
    )
    world = World(charts.rendered(sets=sets))
    world.places["dns"] = (OUTSIDE["dns"][0], {"of": "openshift"})
    for port, opened in ((53, True), (5353, True), (54, False)):
        assert world.allows("rollouter", "dns", port) is opened
    assert not World(charts.rendered()).allows("rollouter", "dns", 5353)


EXTERNAL = 'redis.external.url="redis://redis.data.svc:6379/0"'
OUTSIDES = [
    ("ci/keda.yaml", (), "kubernetesApi", "coordinator", {443, 6443}),
    (
        "ci/everything.yaml",
        ("networkPolicy.extraEgress=[]", "kubernetes.enabled=false"),
        "hub",
        "rollouter",
        {443},
    ),
    ("defaults", (EXTERNAL,), "externalRedis", "trainer", {6379}),
]


@pytest.mark.parametrize(
    ("preset", "sets", "key", "component", "ports"), OUTSIDES, ids=[o[2] for o in OUTSIDES]
)
def test_the_outside_has_addresses_of_both_families(
    preset: str, sets: tuple[str, ...], key: str, component: str, ports: set[int]
) -> None:
    """Unless they are given; none is none, not all: a rule without peers would be one for everybody."""
    assert blocks(preset, component, sets) == {"0.0.0.0/0": ports, "::/0": ports}
    given = (*sets, f'networkPolicy.{key}.cidrs=["fd00:10::/32"]')
    assert blocks(preset, component, given) == {"fd00:10::/32": ports}
    none = (*sets, f"networkPolicy.{key}.cidrs=[]")
    assert blocks(preset, component, none) == {}
    objects = charts.rendered(preset, sets=none)
    assert list(pitfalls.peers_of_policies(objects)) == []


def test_an_external_redis_may_be_pods_of_this_cluster() -> None:
    """Which some plugins find by labels only."""
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "data"}}}
    sets = (EXTERNAL, f"networkPolicy.externalRedis={json.dumps({'cidrs': [], 'peers': [peer]})}")
    world = World(charts.rendered(sets=sets))
    world.places["theirs"] = ({"kubernetes.io/metadata.name": "data"}, {"app": "redis"})
    for component in ("rollouter", "trainer", "queue", "coordinator", "test"):
        assert world._side(component, "theirs", 6379, "Egress", "to"), component
        assert not world._side(component, "stranger", 6379, "Egress", "to"), component


def test_every_port_of_the_table_is_one_of_a_pod() -> None:
    found = {pod.component: pod.port_names for pod in pods(charts.rendered()) if pod.component != "test"}
    assert found == TABLE["ports"]


def test_every_peer_of_a_variable_is_in_the_table() -> None:
    """What a pod is told to connect to, it may connect to."""
    objects = charts.rendered()
    world = World(objects)
    named = {
        "HEADRACE_COORDINATOR": "coordinator",
        "HEADRACE_REDIS_URL": "redis",
    }
    told = 0
    for pod in pods(objects):
        for source, variable, value in _variables(pod):
            if variable in named:
                port = int(re.search(r":(\d+)", value.removeprefix("redis:"))[1])  # type: ignore[index]
                assert world.allows(source, named[variable], port), f"{source}: {variable}={value}"
                told += 1
    assert told >= 6


def _variables(pod: Pod) -> Iterator[tuple[str, str, str]]:
    for container in pod.containers:
        for variable in container.get("env", []):
            yield pod.component, variable["name"], variable.get("value", "")


def table_of_the_page() -> list[list[str]]:
    page = (ROOT / "docs" / "security.md").read_text()
    block = page.split("<!-- flows -->")[1]
    rows = [line.strip().strip("|").split("|") for line in block.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_page_shows_the_table() -> None:
    expected = []
    for flow in TABLE["flows"]:
        ports = TABLE["ports"].get(flow["to"], {})
        port = ports.get(flow["port"], flow["port"])
        expected.append([", ".join(flow["from"]), flow["to"], str(port), flow["what"], flow["guard"]])
    shown = [row[:5] for row in table_of_the_page()]
    lines = "\n".join("| " + " | ".join(row) + " |" for row in expected)
    assert shown == expected, f"docs/security.md, between its marks, should have:\n{lines}"
