"""What schemas accept, and clusters refuse or mistreat: a small function for each, which yields sentences."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from tests.deploy.helm.objects import Object, Pod, matches, name_of, of_kind, pods

_LABEL = re.compile(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")
_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
_PORT_NAME = re.compile(r"^(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$")
_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$")
_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SECRET_NAME = re.compile(r"(TOKEN|PASSWORD|SECRET|API_KEY|AUTH)$")
_LONGEST = {"StatefulSet": 52, "LeaderWorkerSet": 50, "Deployment": 63, "Service": 63}
"""A StatefulSet's name gets a hash of eleven characters as the value of a label; that of a group's workers is
called like the LeaderWorkerSet, and `-0`."""

Check = Callable[[Sequence[Object]], Iterator[str]]


def quantity(value: Any) -> float | None:
    """A Kubernetes quantity as a number; None where it is none."""
    found = _QUANTITY.match(str(value))
    return float(found[1]) * _UNITS[found[2] or ""] if found else None


# -- names and labels ---------------------------------------------------------------------------------


def names(objects: Sequence[Object]) -> Iterator[str]:
    for thing in objects:
        name = thing["metadata"]["name"]
        limit = _LONGEST.get(thing["kind"], 253)
        if len(name) > limit:
            yield f"{name_of(thing)}: {len(name)} characters, at most {limit}"
        if thing["kind"] == "Service" and not _LABEL.match(name):
            yield f"{name_of(thing)}: no name for a Service"
        if thing["kind"] == "LeaderWorkerSet" and not _LABEL.match(name):
            yield f"{name_of(thing)}: no name for the Service that it makes"
        if thing["kind"] == "Service" and name == "vllm":
            yield f"{name_of(thing)}: would set VLLM_PORT"
        for key, value in thing["metadata"].get("labels", {}).items():
            if not isinstance(value, str) or not _VALUE.match(value):
                yield f"{name_of(thing)}: label {key} cannot be {value!r}"
    every = [*((o["kind"], o["metadata"]["name"]) for o in objects), *made_by_others(objects)]
    for (kind, name), count in Counter(every).items():
        if count > 1:
            yield f"{kind} {name}: there {count} times"


def made_by_others(objects: Sequence[Object]) -> Iterator[tuple[str, str]]:
    """What the controller of LeaderWorkerSets makes: a Service and the leaders' StatefulSet of the same name,
    and one for each group's workers."""
    for thing in of_kind(objects, "LeaderWorkerSet"):
        name = thing["metadata"]["name"]
        yield "Service", name
        yield "StatefulSet", name
        yield from (("StatefulSet", f"{name}-{group}") for group in range(thing["spec"]["replicas"]))


def selectors_of_workloads(objects: Sequence[Object]) -> Iterator[str]:
    every = list(pods(objects))
    for thing in of_kind(objects, "Deployment", "StatefulSet"):
        selector = thing["spec"]["selector"]
        if not selector.get("matchLabels"):
            yield f"{name_of(thing)}: selects every pod"
        taken = [pod.name for pod in every if matches(selector, pod.labels)]
        if taken != [name_of(thing)]:
            yield f"{name_of(thing)}: its selector takes {taken or 'no pod'}"


def selectors_of_others(objects: Sequence[Object]) -> Iterator[str]:
    """Services, monitors, budgets and policies without a pod do nothing, and nobody says so."""
    every = list(pods(objects))
    for thing in of_kind(objects, "Service", "PodMonitor", "PodDisruptionBudget", "NetworkPolicy"):
        spec = thing["spec"]
        selector = spec.get("podSelector") or spec.get("selector")
        if thing["kind"] == "Service":
            selector = {"matchLabels": spec["selector"]}
        taken = [pod for pod in every if matches(selector, pod.labels)]
        if not taken:
            yield f"{name_of(thing)}: its selector takes no pod"
        for port in spec.get("ports", []) if thing["kind"] == "Service" else []:
            if not all(port["targetPort"] in {*p.port_names, *p.port_names.values()} for p in taken):
                yield f"{name_of(thing)}: its pods have no port {port['targetPort']}"
        for endpoint in spec.get("podMetricsEndpoints", []):
            if not all(endpoint["port"] in pod.port_names for pod in taken):
                yield f"{name_of(thing)}: its pods have no port {endpoint['port']}"


def peers_of_policies(objects: Sequence[Object]) -> Iterator[str]:
    """A peer within the release that no pod is, and a rule that names none: one for all the world."""
    every = list(pods(objects))
    for policy in of_kind(objects, "NetworkPolicy"):
        for key, side in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(key, []):
                if not rule.get(side):
                    yield f"{name_of(policy)}: {key} of everybody, ports {rule.get('ports')}"
                for peer in rule.get(side, []):
                    ours = "podSelector" in peer and "namespaceSelector" not in peer
                    if ours and not any(matches(peer["podSelector"], pod.labels) for pod in every):
                        yield f"{name_of(policy)}: {key} peer {peer} is no pod"


# -- inside a pod -------------------------------------------------------------------------------------


def duplicates(objects: Sequence[Object]) -> Iterator[str]:
    """Server-side apply refuses them; client-side apply took the last one silently."""
    for pod in pods(objects):
        lists = {"container": [c["name"] for c in pod.containers]}
        lists["volume"] = [v["name"] for v in pod.spec.get("volumes", [])]
        lists["port"] = [p["name"] for c in pod.containers for p in c.get("ports", [])]
        lists["port number"] = [p["containerPort"] for c in pod.containers for p in c.get("ports", [])]
        for container in pod.containers:
            where = f"{container['name']} "
            lists[where + "variable"] = [e["name"] for e in container.get("env", [])]
            lists[where + "mount path"] = [m["mountPath"] for m in container.get("volumeMounts", [])]
        for what, found in lists.items():
            for name, count in Counter(found).items():
                if count > 1:
                    yield f"{pod.name}: {what} {name} {count} times"


def ports(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        for name in pod.port_names:
            if not _PORT_NAME.match(name):
                yield f"{pod.name}: {name!r} is no port name (15 characters at most)"
        for container in pod.containers:
            own = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                for kind in ("httpGet", "tcpSocket", "grpc"):
                    port = container.get(probe, {}).get(kind, {}).get("port")
                    if port is not None and port not in own and port not in own.values():
                        yield f"{pod.name}: {probe} of {container['name']} asks port {port}, which it has not"
                    if kind == "grpc" and isinstance(port, str):
                        yield f"{pod.name}: {probe}.grpc takes a port's number, not {port!r}"


def mounts(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        claims = [t["metadata"]["name"] for t in pod.owner["spec"].get("volumeClaimTemplates", [])]
        volumes = {v["name"] for v in pod.spec.get("volumes", [])} | set(claims)
        used = {m["name"] for c in pod.containers for m in c.get("volumeMounts", [])}
        for name in sorted(used - volumes):
            yield f"{pod.name}: mounts {name}, which is no volume"
        for name in sorted(volumes - used):
            yield f"{pod.name}: volume {name} is mounted nowhere"
        for container in pod.containers:
            found = {PurePosixPath(m["mountPath"]): m for m in container.get("volumeMounts", [])}
            for path in found:
                outer = [p for p in path.parents if p in found and found[p].get("readOnly")]
                if outer:
                    yield f"{pod.name}: {path} cannot be made inside {outer[0]}, which is read-only"


def references(objects: Sequence[Object]) -> Iterator[str]:
    """A name that begins with the release's is an object of the release, and has to be there."""
    there = {(o["kind"], o["metadata"]["name"]) for o in objects}
    release = next(iter(pods(objects))).labels["app.kubernetes.io/instance"]
    for pod in pods(objects):
        for kind, name in _references(pod):
            if name.startswith(f"{release}-") and (kind, name) not in there:
                yield f"{pod.name}: there is no {kind} {name}"
    for binding in of_kind(objects, "RoleBinding"):
        if ("Role", binding["roleRef"]["name"]) not in there:
            yield f"{name_of(binding)}: there is no Role {binding['roleRef']['name']}"
        for subject in binding["subjects"]:
            if (subject["kind"], subject["name"]) not in there:
                yield f"{name_of(binding)}: there is no {subject['kind']} {subject['name']}"


def _references(pod: Pod) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", pod.spec.get("serviceAccountName", "default")
    for volume in pod.spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        for source in volume.get("projected", {}).get("sources", []):
            yield "Secret", source["secret"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in pod.containers:
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                yield "Secret", source["secretKeyRef"]["name"]
            if re.search(r"_COORDINATOR$", variable["name"]) and "value" in variable:
                yield "Service", variable["value"].split(":")[0]


def variables(objects: Sequence[Object]) -> Iterator[str]:
    """`$(NAME)` that no variable is stays as it is written."""
    for pod in pods(objects):
        for container in pod.containers:
            there = {e["name"] for e in container.get("env", [])}
            for word in [*container.get("command", []), *container.get("args", [])]:
                for name in re.findall(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", word):
                    if name not in there:
                        yield f"{pod.name}: {container['name']} uses $({name}), which is not set"


def quantities(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod.containers:
            resources = container.get("resources", {})
            values = {kind: resources.get(kind, {}) for kind in ("requests", "limits")}
            if not values["requests"].get("memory") or not values["limits"].get("memory"):
                yield f"{pod.name}: {container['name']} says nothing of its memory"
            for kind, found in values.items():
                for resource, value in found.items():
                    if quantity(value) is None:
                        yield f"{pod.name}: {kind} {resource} cannot be {value!r}"
            for resource, limit in values["limits"].items():
                least, most = quantity(values["requests"].get(resource, 0)), quantity(limit)
                if least is not None and most is not None and least > most:
                    yield f"{pod.name}: {container['name']} requests more {resource} than its limit"
        for volume in pod.spec.get("volumes", []):
            size = volume.get("emptyDir", {}).get("sizeLimit", "1")
            if quantity(size) is None:
                yield f"{pod.name}: volume {volume['name']} cannot have size {size!r}"


def writable_home(objects: Sequence[Object]) -> Iterator[str]:
    """The root file system is read-only: caches have to lie on a volume that is not."""
    for pod in pods(objects):
        for container in pod.containers:
            free = [PurePosixPath(m["mountPath"]) for m in container.get("volumeMounts", [])
                    if not m.get("readOnly")]  # fmt: skip
            for variable in container.get("env", []):
                name, value = variable["name"], variable.get("value", "")
                kept = name == "HOME" or name.endswith(
                    ("_CACHE_DIR", "_CACHE_HOME", "_CACHE_ROOT", "HF_HOME")
                )
                if kept and not any(PurePosixPath(value).is_relative_to(path) for path in free):
                    yield f"{pod.name}: {name} of {container['name']} is {value}, which cannot be written"


# -- life and death -----------------------------------------------------------------------------------


def grace(objects: Sequence[Object]) -> Iterator[str]:
    config = run_config(objects)
    budget = config.get("services", {}).get("stop_timeout_s", 60)
    longest = 0
    for pod in pods(objects):
        if pod.component in ("rollouter", "trainer"):
            given = pod.spec.get("terminationGracePeriodSeconds", 30)
            longest = max(longest, given)
            if given <= budget:
                yield f"{pod.name}: is killed after {given} s, but may take {budget} s to stop in order"
    for pod in pods(objects):
        if pod.component == "redis":
            given = pod.spec.get("terminationGracePeriodSeconds", 30)
            if given <= longest:
                yield f"{pod.name}: is killed after {given} s, while others may save for {longest} s"
            hook = pod.spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {})
            if f" -lt {longest} ]" not in " ".join(hook.get("command", [])):
                yield f"{pod.name}: does not wait {longest} s for those that save"


def last_words(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod.containers:
            if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
                yield f"{pod.name}: `kubectl describe` does not say why {container['name']} has ended"


def rolling(objects: Sequence[Object]) -> Iterator[str]:
    """One pod more than there are GPUs waits for ever."""
    for thing in of_kind(objects, "Deployment"):
        strategy = thing["spec"].get("strategy", {})
        surge = strategy.get("rollingUpdate", {}).get("maxSurge", "25%")
        if strategy.get("type") != "Recreate" and surge != 0:
            yield f"{name_of(thing)}: an update starts a pod more than there is room for"
    for thing in of_kind(objects, "LeaderWorkerSet"):
        if (
            thing["spec"].get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {}).get("maxSurge")
            != 0
        ):
            yield f"{name_of(thing)}: an update may start a group more than there is room for"


def autoscaled(objects: Sequence[Object]) -> Iterator[str]:
    targets = {o["spec"]["scaleTargetRef"]["name"] for o in of_kind(objects, "ScaledObject")}
    for thing in of_kind(objects, "Deployment"):
        if thing["metadata"]["name"] in targets and "replicas" in thing["spec"]:
            yield f"{name_of(thing)}: the chart and the autoscaler both set its replicas"
    for name in targets - {o["metadata"]["name"] for o in of_kind(objects, "Deployment")}:
        yield f"ScaledObject: there is no Deployment {name}"


def service_links(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        if pod.spec.get("enableServiceLinks", True):
            yield f"{pod.name}: gets a variable for each port of each Service of its namespace"


def configuration_is_live(objects: Sequence[Object]) -> Iterator[str]:
    """A file mounted by subPath never changes."""
    for pod in pods(objects):
        shown = {v["name"] for v in pod.spec.get("volumes", []) if "configMap" in v or "secret" in v}
        for container in pod.containers:
            for mount in container.get("volumeMounts", []):
                if mount["name"] in shown and "subPath" in mount:
                    yield f"{pod.name}: {mount['mountPath']} is mounted by subPath"


# -- access -------------------------------------------------------------------------------------------


def tokens(objects: Sequence[Object]) -> Iterator[str]:
    """A token of the Kubernetes API where nothing is allowed with it only helps an attacker."""
    bound = {s["name"] for b in of_kind(objects, "RoleBinding") for s in b["subjects"]}
    accounts = {o["metadata"]["name"]: o for o in of_kind(objects, "ServiceAccount")}
    for pod in pods(objects):
        account = accounts.get(pod.spec.get("serviceAccountName", "default"))
        by_account = (account or {}).get("automountServiceAccountToken", True)
        mounted = pod.spec.get("automountServiceAccountToken", by_account)
        if mounted and pod.spec.get("serviceAccountName") not in bound:
            yield f"{pod.name}: has a token that it has no use for"
        if not mounted and pod.spec.get("serviceAccountName") in bound:
            yield f"{pod.name}: has rights, but no token to use them"


def roles(objects: Sequence[Object]) -> Iterator[str]:
    for role in of_kind(objects, "Role", "ClusterRole"):
        if role["kind"] == "ClusterRole":
            yield f"{name_of(role)}: the run needs nothing outside its namespace"
        for rule in role["rules"]:
            if "*" in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]:
                yield f"{name_of(role)}: allows everything of a kind"
            if {"secrets", "pods/exec", "roles", "rolebindings"} & set(rule["resources"]):
                yield f"{name_of(role)}: may touch {rule['resources']}"
            changes = {"patch", "update", "delete"} & set(rule["verbs"])
            for resource in rule["resources"]:
                if resource.endswith("/scale") and changes and not rule.get("resourceNames"):
                    yield f"{name_of(role)}: may scale all {resource.removesuffix('/scale')}"


def secrets(objects: Sequence[Object]) -> Iterator[str]:
    """Credentials are in Secrets alone: everybody may read a variable's value, an argument or a ConfigMap."""
    known = [
        base64.b64decode(value).decode()
        for thing in of_kind(objects, "Secret")
        for value in (thing.get("data") or {}).values()
    ]
    for thing in objects:
        text = yaml.safe_dump(
            {k: v for k, v in thing.items() if not (thing["kind"] == "Secret" and k == "data")}
        )
        if any(secret in text for secret in known):
            yield f"{name_of(thing)}: holds a credential"
        if thing["kind"] == "ConfigMap" and re.search(r"rediss?://[^/\s]*:[^/\s]*@", text):
            yield f"{name_of(thing)}: holds a URL with a password"
    for pod in pods(objects):
        for container in pod.containers:
            for variable in container.get("env", []):
                if "value" in variable and _SECRET_NAME.search(variable["name"]):
                    yield f"{pod.name}: {variable['name']} is written out"
            for word in [*container.get("command", []), *container.get("args", [])]:
                if any(_SECRET_NAME.search(name) for name in re.findall(r"\$\((\w+)\)", word)):
                    yield f"{pod.name}: {container['name']} shows a credential in its arguments"


def run_config(objects: Sequence[Object]) -> dict[str, Any]:
    """The run's configuration as the pods read it."""
    maps = [o for o in of_kind(objects, "ConfigMap") if "config.yaml" in o.get("data", {})]
    assert len(maps) == 1, [name_of(o) for o in maps]
    config: dict[str, Any] = yaml.safe_load(maps[0]["data"]["config.yaml"])
    return config


CHECKS: tuple[Check, ...] = (
    names,
    selectors_of_workloads,
    selectors_of_others,
    peers_of_policies,
    duplicates,
    ports,
    mounts,
    references,
    variables,
    quantities,
    writable_home,
    grace,
    last_words,
    rolling,
    autoscaled,
    service_links,
    configuration_is_live,
    tokens,
    roles,
    secrets,
)
