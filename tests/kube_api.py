"""A small Kubernetes API server: stateful, with versions, watches, patches and the answers that clients fear.

It serves pods, volume claims, events, statefulsets, and deployments and leaderworkersets with their scale, of
one namespace, over plain HTTP, in the way that the official Python client and `kubectl` speak to it. Every
write gets a new resourceVersion; a write that names an old one is answered 409, one that changes what is
fixed 422, a watch from before the kept history 410.
`fail` lets the next calls fail. Deleting a pod sets its deletionTimestamp first, as long as `graceful` is on;
`finish_delete` removes it.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests import kube_immutable

NAMESPACE = "runs"
KINDS = {
    "pods": ("v1", "Pod"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
    "deployments": ("apps/v1", "Deployment"),
    "statefulsets": ("apps/v1", "StatefulSet"),
    "events": ("v1", "Event"),
    "leaderworkersets": ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
}
_GROUPS = {kind: f"/{'apis' if '/' in api else 'api'}/{api}" for kind, (api, _) in KINDS.items()}
_POLL_S = 0.5

Object = dict[str, Any]


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.code, self.reason = code, reason


@dataclass
class Failure:
    code: int
    times: int
    path: str
    retry_after: int | None = None


class KubeApi:
    def __init__(self, history: int = 1000) -> None:
        """`history`: changes that a watch can go back to."""
        self.objects: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
        self.requests: list[tuple[str, str]] = []
        """(method, path with query) of all calls."""
        self.deletions: list[Object] = []
        """The options of each."""
        self.graceful = True
        self.expandable = True
        """Whether the storage class of volume claims lets them grow."""
        self._history = history
        self._changes: list[tuple[int, str, str, Object]] = []  # version, kind, type, object
        self._version = itertools.count(1)
        self._now = 0
        self._oldest = 0
        self._failures: list[Failure] = []
        self._state = threading.Condition()
        self._closed = False
        api = self

        class Handler(_Handler):
            kube = api

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def kubeconfig(self) -> str:
        """What a client needs to know, as YAML (JSON is YAML)."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
                "users": [{"name": "fake", "user": {"token": "a-token"}}],
                "contexts": [
                    {"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": NAMESPACE}}
                ],
            }
        )

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._server.shutdown()
        self._server.server_close()

    # -- what a test does ------------------------------------------------------------------------

    def fail(self, code: int, times: int = 1, path: str = "", retry_after: int | None = None) -> None:
        """The next `times` calls whose path has `path` in it are answered `code`."""
        with self._state:
            self._failures.append(Failure(code, times, path, retry_after))

    def mend(self) -> None:
        with self._state:
            self._failures.clear()

    def forget_history(self) -> None:
        """Watches from any earlier version are answered 410, open ones get an ERROR event."""
        with self._state:
            self._changes.clear()
            self._now = self._oldest = next(self._version)
            self._state.notify_all()

    def add_deployment(self, name: str, replicas: int = 1) -> None:
        labels = {"app": name}
        spec = {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "main", "image": "none"}]},
            },
        }
        self.create("deployments", {"metadata": {"name": name, "labels": labels}, "spec": spec})

    def add_leader_worker_set(self, name: str, size: int) -> None:
        """One group of `size` pods."""
        template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        spec = {"replicas": 1, "leaderWorkerTemplate": {"size": size, "workerTemplate": template}}
        self.create("leaderworkersets", {"metadata": {"name": name}, "spec": spec, "status": {"replicas": 1}})

    def add_pod(self, name: str, deployment: str) -> None:
        self.create(
            "pods",
            {
                "metadata": {"name": name, "labels": {"app": deployment}},
                "spec": {"containers": [{"name": "main", "image": "none"}]},
                "status": {"phase": "Running"},
            },
        )

    def delete_pod(self, name: str) -> None:
        self.delete("pods", name)

    def finish_delete(self, name: str) -> None:
        """The kubelet: all containers have ended."""
        with self._state:
            self._change("pods", "DELETED", self.objects["pods"].pop(name))

    def annotations(self, pod: str) -> dict[str, str]:
        with self._state:
            return dict(self.objects["pods"][pod]["metadata"].get("annotations") or {})

    def replicas(self, workload: str) -> int:
        with self._state:
            found = {**self.objects["deployments"], **self.objects["leaderworkersets"]}
            return int(found[workload]["spec"]["replicas"])

    def events(self) -> list[Object]:
        with self._state:
            return copy.deepcopy(list(self.objects["events"].values()))

    # -- storage ---------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Object:
        with self._state:
            if name not in self.objects[kind]:
                raise ApiError(404, "NotFound", f'{kind} "{name}" not found')
            return copy.deepcopy(self.objects[kind][name])

    def create(self, kind: str, body: Object) -> Object:
        with self._state:
            name = body["metadata"]["name"]
            if name in self.objects[kind]:
                raise ApiError(409, "AlreadyExists", f'{kind} "{name}" already exists')
            found = copy.deepcopy(body)
            api, named = KINDS[kind]
            found |= {"apiVersion": api, "kind": named}
            meta = found["metadata"]
            meta |= {"namespace": NAMESPACE, "uid": f"uid-{next(self._version)}"}
            meta["creationTimestamp"] = _stamp()
            if kind == "events":
                _check_event(found)
            if kind == "deployments":
                meta["generation"] = 1
                found.setdefault("status", {"observedGeneration": 1, "replicas": found["spec"]["replicas"]})
            self.objects[kind][name] = found
            return self._change(kind, "ADDED", found)

    def update(self, kind: str, name: str, change: Callable[[Object], Object]) -> Object:
        """`change` gives the new object. Raises ApiError 409 when that names another version."""
        with self._state:
            old = self.get(kind, name)
            new = change(copy.deepcopy(old))
            if new["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
                raise ApiError(409, "Conflict", "the object has been modified; apply your changes to it")
            if new == old:
                return old
            if problems := kube_immutable.violations(old, new, self.expandable):
                raise ApiError(422, "Invalid", f'{KINDS[kind][1]} "{name}" is invalid: {"; ".join(problems)}')
            self.objects[kind][name] = new
            return self._change(kind, "MODIFIED", new)

    def delete(self, kind: str, name: str) -> Object:
        with self._state:
            found = self.get(kind, name)
            if kind == "pods" and self.graceful:
                return self.update(kind, name, _told_to_go)
            del self.objects[kind][name]
            return self._change(kind, "DELETED", found)

    def _change(self, kind: str, what: str, found: Object) -> Object:
        self._now = next(self._version)
        found["metadata"]["resourceVersion"] = str(self._now)
        self._changes.append((self._now, kind, what, copy.deepcopy(found)))
        while len(self._changes) > self._history:
            self._oldest = self._changes.pop(0)[0]
        self._state.notify_all()
        return copy.deepcopy(found)

    # -- requests --------------------------------------------------------------------------------

    def failure(self, path: str) -> Failure | None:
        with self._state:
            for found in self._failures:
                if found.times > 0 and found.path in path:
                    found.times -= 1
                    return found
        return None

    def listed(self, kind: str, selector: str) -> Object:
        with self._state:
            api, named = KINDS[kind]
            items = [copy.deepcopy(o) for o in self.objects[kind].values() if _matches(o, selector)]
            meta = {"resourceVersion": str(self._now)}
            return {"apiVersion": api, "kind": f"{named}List", "metadata": meta, "items": items}

    def watched(
        self, kind: str, selector: str, since: int, timeout_s: float, send: Callable[[Object], None]
    ) -> None:
        """Changes from `since` on, until the time is up."""
        end = time.monotonic() + timeout_s
        while not self._closed and time.monotonic() < end:
            with self._state:
                if since < self._oldest:
                    send({"type": "ERROR", "object": _status(410, "Expired", "too old resource version")})
                    return
                due = [(v, what, o) for v, k, what, o in self._changes if v > since and k == kind]
                if not due:
                    self._state.wait(min(_POLL_S, max(0.0, end - time.monotonic())))
                    continue
            for version, what, found in due:
                since = version
                if _matches(found, selector):
                    send({"type": what, "object": found})


class _Handler(BaseHTTPRequestHandler):
    kube: KubeApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.kube.requests.append((self.command, self.path))
        if (failure := self.kube.failure(self.path)) is not None:
            more = {"Retry-After": str(failure.retry_after)} if failure.retry_after is not None else {}
            self._answer(failure.code, _status(failure.code, "Failure", "as asked for"), more)
            return
        try:
            found = self._dispatch(json.loads(body) if body else {})
        except ApiError as error:
            self._answer(error.code, _status(error.code, error.reason, str(error)))
            return
        if found is not None:
            self._answer(201 if self.command == "POST" else 200, found)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _dispatch(self, body: Object) -> Object | None:
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        if (found := _DISCOVERY.get(url.path)) is not None:
            return found
        for kind, group in _GROUPS.items():
            root = f"{group}/namespaces/{NAMESPACE}/{kind}"
            if url.path == root or url.path.startswith(root + "/"):
                name, _, sub = url.path[len(root) + 1 :].partition("/")
                return self._resource(kind, name, sub, query, body)
        raise ApiError(404, "NotFound", f"the server could not find {url.path}")

    def _resource(self, kind: str, name: str, sub: str, query: dict[str, str], body: Object) -> Object | None:
        kube, method = self.kube, self.command
        selector = query.get("labelSelector", "")
        if not name and method == "GET" and query.get("watch") in ("true", "True", "1"):
            self._watch(kind, selector, query)
            return None
        if not name and method == "GET":
            return kube.listed(kind, selector)
        if not name and method == "POST":
            return kube.create(kind, body)
        if sub == "scale" and kind in ("deployments", "leaderworkersets"):
            return self._scale(kind, name, body, query.get("fieldManager") or "unknown")
        if method == "GET":
            return kube.get(kind, name)
        if method == "DELETE":
            kube.deletions.append(body)
            return kube.delete(kind, name)
        if method == "PUT":
            return kube.update(kind, name, lambda old: body | {"status": old.get("status")})
        patch = _patcher(self.headers.get("Content-Type") or "")
        return kube.update(kind, name, lambda old: patch(old, body))

    def _scale(self, kind: str, name: str, body: Object, manager: str) -> Object:
        if self.command == "GET":
            return _to_scale(self.kube.get(kind, name))
        if self.command == "PATCH":
            _patcher(self.headers.get("Content-Type") or "")

        def change(old: Object) -> Object:
            version = (body.get("metadata") or {}).get("resourceVersion")
            if version is not None:
                old["metadata"]["resourceVersion"] = version
            replicas = int((body.get("spec") or {}).get("replicas", 0))
            if replicas != old["spec"]["replicas"]:
                old["metadata"]["managedFields"] = [_sets_replicas(manager)]
            old["spec"]["replicas"] = replicas
            return old

        return _to_scale(self.kube.update(kind, name, change))

    def _watch(self, kind: str, selector: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def send(event: Object) -> None:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()

        since, limit = int(query.get("resourceVersion") or 0), float(query.get("timeoutSeconds") or 300)
        try:
            self.kube.watched(kind, selector, since, limit, send)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _answer(self, code: int, found: Object, headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(raw)


# -- parts of the protocol ----------------------------------------------------------------------------


def _stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _check_event(event: Object) -> None:
    """What the API asks of an event that has the time of its first occurrence."""
    for key in ("eventTime", "reportingComponent", "reportingInstance", "action", "reason"):
        if not event.get(key):
            raise ApiError(422, "Invalid", f"{key}: Required value")
    if event["involvedObject"].get("namespace") != NAMESPACE:
        raise ApiError(422, "Invalid", "involvedObject.namespace: does not match event.namespace")
    if len(event["message"]) > 1024 or len(event["reportingInstance"]) > 128:
        raise ApiError(422, "Invalid", "message, reportingInstance: too long")


def _told_to_go(pod: Object) -> Object:
    pod["metadata"].setdefault("deletionTimestamp", _stamp())
    pod["metadata"].setdefault("deletionGracePeriodSeconds", 30)
    return pod


def _matches(found: Object, selector: str) -> bool:
    labels = found["metadata"].get("labels") or {}
    pairs = (part.split("=", 1) for part in selector.replace("==", "=").split(",") if part)
    return all(labels.get(key) == value for key, value in pairs)


def _to_scale(workload: Object) -> Object:
    meta = {k: workload["metadata"][k] for k in ("name", "namespace", "uid", "resourceVersion")}
    labels = workload["spec"].get("selector", {}).get("matchLabels", {})
    selector = ",".join(f"{k}={v}" for k, v in labels.items())
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": meta | {"creationTimestamp": workload["metadata"]["creationTimestamp"]},
        "spec": {"replicas": workload["spec"]["replicas"]},
        "status": {"replicas": workload["status"]["replicas"], "selector": selector},
    }


def _sets_replicas(manager: str) -> Object:
    """Whoever changes a field owns it alone."""
    return {
        "manager": manager,
        "operation": "Update",
        "subresource": "scale",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:replicas": {}}},
    }


def _status(code: int, reason: str, message: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _patcher(content_type: str) -> Callable[[Object, Object], Object]:
    """Merge patch; also for strategic merge, which differs in lists only, and no list is patched here."""
    if content_type.partition(";")[0] not in (
        "application/merge-patch+json",
        "application/strategic-merge-patch+json",
    ):
        raise ApiError(415, "UnsupportedMediaType", f"{content_type} is not supported here")
    return _merge


def _merge(old: Object, patch: Object) -> Object:
    for key, value in patch.items():
        if value is None:
            old.pop(key, None)
        elif isinstance(value, dict):
            old[key] = _merge(old[key] if isinstance(old.get(key), dict) else {}, value)
        else:
            assert not isinstance(value, list), "lists need strategic merge"
            old[key] = value
    return old


def _resources(group: str, *rows: tuple[str, str, list[str]]) -> Object:
    resources = [
        {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for name, kind, verbs in rows
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}


_ALL = ["create", "delete", "get", "list", "patch", "update", "watch"]
_SCALE = {
    "name": "deployments/scale",
    "singularName": "",
    "namespaced": True,
    "group": "autoscaling",
    "version": "v1",
    "kind": "Scale",
    "verbs": ["get", "patch", "update"],
}


def _group(name: str) -> Object:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


_core = _resources(
    "v1",
    ("pods", "Pod", _ALL),
    ("events", "Event", _ALL),
    ("persistentvolumeclaims", "PersistentVolumeClaim", _ALL),
)
_core["resources"][-1]["shortNames"] = ["pvc"]
_apps = _resources("apps/v1", ("deployments", "Deployment", _ALL), ("statefulsets", "StatefulSet", _ALL))
_apps["resources"].append(_SCALE)
_DISCOVERY: dict[str, Object] = {
    "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group("apps")],
    },
    "/api/v1": _core,
    "/apis/apps/v1": _apps,
}
