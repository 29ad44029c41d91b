"""As much of a Kubernetes API as `lookup` in a chart needs: discovery, objects by name, and who may read."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Collection, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.helm.objects import Object

_KINDS = {
    "v1": ("ConfigMap", "Secret", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
}


def _plural(kind: str) -> str:
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"


def _answer(path: str, objects: Sequence[Object]) -> dict[str, Any] | None:
    path = path.split("?")[0]
    if path == "/version":
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": g, "version": g.split("/")[1]} for g in _KINDS if g != "v1"]
        groups = [
            {"name": v["groupVersion"].split("/")[0], "versions": [v], "preferredVersion": v}
            for v in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    for group, kinds in _KINDS.items():
        if path == ("/api/v1" if group == "v1" else f"/apis/{group}"):
            listed = [
                {"name": _plural(k), "singularName": "", "namespaced": True, "kind": k, "verbs": ["get"]}
                for k in kinds
            ]
            return {"kind": "APIResourceList", "groupVersion": group, "resources": listed}
    *_, plural, name = path.split("/")
    for thing in objects:
        if _plural(thing["kind"]) == plural and thing["metadata"]["name"] == name:
            return thing
    return None


def _refusal(path: str, readable: Collection[str] | None) -> dict[str, Any] | None:
    """The answer to a request for another kind than those in `readable`. Discovery is everybody's."""
    kind = next((k for kinds in _KINDS.values() for k in kinds if f"/{_plural(k)}/" in path), None)
    if kind is None or readable is None or kind in readable:
        return None
    message = f'{_plural(kind)} is forbidden: User "somebody" cannot get resource in the namespace'
    return {"kind": "Status", "status": "Failure", "message": message, "reason": "Forbidden", "code": 403}


@contextlib.contextmanager
def cluster(
    objects: Sequence[Object], folder: Path, readable: Collection[str] | None = None
) -> Iterator[Path]:
    """Serve `objects`, of other kinds than `readable` none; yields a kubeconfig."""
    missing: dict[str, Any] = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = _refusal(self.path, readable) or _answer(self.path, objects) or missing
            body = json.dumps(found)
            self.send_response(found.get("code", 200))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
                "clusters": [
                    {"name": "fake", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
                ],
                "users": [{"name": "fake", "user": {}}],
            }
        )
    )
    try:
        yield kubeconfig
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)
