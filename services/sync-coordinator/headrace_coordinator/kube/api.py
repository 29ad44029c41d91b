"""The few calls of the Kubernetes API that the coordinator makes. Each has a deadline.

All calls block, so run them in threads. The official client refreshes the service account's token. It retries
nothing here: the caller decides when to retry.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.config.kubernetes import KubernetesConfig

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
FIELD_MANAGER = "headrace-coordinator"
"""The API records under this name which fields the coordinator has set. The chart looks for it: a trainer
that the coordinator scaled to zero belongs to a completed run, and an upgrade leaves it there."""
_LEADER_WORKER_SETS = ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets")
"""Group, version and plural of an API that is not part of Kubernetes itself."""
_WATCH_S = 240
"""Seconds after which the server ends a watch."""


class ClusterError(RuntimeError):
    """An API call failed."""

    def __init__(self, call: str, what: str, status: int | None) -> None:
        super().__init__(f"{call}: {what}")
        self.call = call
        self.status = status
        """The HTTP status, or None without an answer."""


class Expired(ClusterError):
    """Status 410: the watch cannot continue from its version, so everything must be listed again."""


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    leaving: bool
    """It has a deletionTimestamp, so it is terminating."""
    ended: bool
    """All its containers have ended for good."""
    cost: int | None
    """Its current deletion cost."""


def to_pod(found: Any) -> Pod:
    cost = (found.metadata.annotations or {}).get(DELETION_COST)
    return Pod(
        name=found.metadata.name,
        uid=found.metadata.uid or "",
        leaving=found.metadata.deletion_timestamp is not None,
        ended=found.status is not None and found.status.phase in ("Succeeded", "Failed"),
        cost=_number(cost),
    )


def _number(text: str | None) -> int | None:
    """Parse an annotation, which anybody may write, or return None."""
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


class Cluster:
    def __init__(self, config: KubernetesConfig) -> None:
        """Raises ClusterError when no cluster is found."""
        from kubernetes import client
        from kubernetes import config as loader

        settings = client.Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST"):
                loader.load_incluster_config(client_configuration=settings)
            else:
                loader.load_kube_config(client_configuration=settings)
        except loader.ConfigException as error:
            raise ClusterError("configuration", str(error), None) from None
        settings.retries = False
        api = client.ApiClient(settings)
        self._core, self._apps, self._custom = (
            client.CoreV1Api(api),
            client.AppsV1Api(api),
            client.CustomObjectsApi(api),
        )
        self._sets = {config.trainer_deployment} if config.trainer_kind == "LeaderWorkerSet" else set()
        self.timeout_s = config.request_timeout_s
        """Longest wait for one answer, in seconds. May be changed."""
        self.namespace = config.namespace or _own_namespace()

    def pod_selector(self, deployment: str) -> str:
        """The label selector of a Deployment's pods. Never empty, which would select every pod."""
        found = self._call("pod_selector", self._apps.read_namespaced_deployment, deployment, self.namespace)
        labels = found.spec.selector.match_labels
        if not labels:
            raise ClusterError("pod_selector", f"{deployment} has no matchLabels in its selector", None)
        return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))

    def pods(self, selector: str) -> tuple[list[Pod], str]:
        """All pods, and the resource version from which to watch."""
        found = self._call("pods", self._core.list_namespaced_pod, self.namespace, label_selector=selector)
        return [to_pod(pod) for pod in found.items], found.metadata.resource_version

    def pod(self, name: str) -> Pod | None:
        """The pod of that name, whatever its labels, or None."""
        try:
            return to_pod(self._call("pod", self._core.read_namespaced_pod, name, self.namespace))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def watch(self, selector: str, version: str) -> Iterator[tuple[str, Pod]]:
        """Yield (ADDED | MODIFIED | DELETED, pod) until the server ends the watch. Raises Expired."""
        from kubernetes.watch import Watch

        stream = Watch().stream(
            self._core.list_namespaced_pod,
            self.namespace,
            label_selector=selector,
            resource_version=version,
            timeout_seconds=_WATCH_S,
            _request_timeout=(self.timeout_s, _WATCH_S + self.timeout_s),
        )
        while True:
            event = self._call("watch", next, stream, None)
            if event is None:
                return
            if event["type"] != "BOOKMARK":
                yield event["type"], to_pod(event["object"])

    def set_deletion_cost(self, pod: str, cost: int) -> None:
        body = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
        self._call(
            "set_deletion_cost",
            self._core.patch_namespaced_pod,
            pod,
            self.namespace,
            body,
            _content_type="application/strategic-merge-patch+json",
        )

    def scale(self, workload: str, replicas: int) -> None:
        """Set the number of a Deployment's pods, or of a LeaderWorkerSet's groups."""
        body, content = {"spec": {"replicas": replicas}}, "application/merge-patch+json"
        if workload in self._sets:
            group, version, plural = _LEADER_WORKER_SETS
            self._call(
                "scale",
                self._custom.patch_namespaced_custom_object_scale,
                group,
                version,
                self.namespace,
                plural,
                workload,
                body,
                field_manager=FIELD_MANAGER,
                _content_type=content,
            )
        else:
            self._call(
                "scale",
                self._apps.patch_namespaced_deployment_scale,
                workload,
                self.namespace,
                body,
                field_manager=FIELD_MANAGER,
                _content_type=content,
            )

    def create_event(
        self,
        name: str,
        kind: str,
        about: str,
        reason: str,
        note: str,
        warning: bool,
        reporter: str,
        at: datetime,
    ) -> None:
        """Create an Event about the Pod or Deployment (`kind`) named `about`.

        A LeaderWorkerSet is recognised by its name. An Event that already exists comes from an attempt whose
        answer was lost. Events go to the core group because a namespace's admin has no rights on
        events.k8s.io to grant.
        """
        api_version = "v1" if kind == "Pod" else "apps/v1"
        if kind == "Deployment" and about in self._sets:
            kind, api_version = "LeaderWorkerSet", "/".join(_LEADER_WORKER_SETS[:2])
        body = {
            "metadata": {"name": name, "namespace": self.namespace},
            "eventTime": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingComponent": "headrace.dev/coordinator",
            "reportingInstance": reporter[:128],
            "action": "Sync",
            "reason": reason,
            "involvedObject": {
                "apiVersion": api_version,
                "kind": kind,
                "name": about,
                "namespace": self.namespace,
            },
            "message": note[:1024],
            "type": "Warning" if warning else "Normal",
        }
        try:
            self._call("create_event", self._core.create_namespaced_event, self.namespace, body)
        except ClusterError as error:
            if error.status != 409:
                raise

    def count_event(self, name: str, count: int, at: datetime) -> None:
        """Update an Event that has now happened `count` times."""
        stamp = at.isoformat(timespec="microseconds").replace("+00:00", "Z")
        body = {"series": {"count": count, "lastObservedTime": stamp}}
        self._call(
            "count_event",
            self._core.patch_namespaced_event,
            name,
            self.namespace,
            body,
            _content_type="application/merge-patch+json",
        )

    def _call(self, call: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        if function is not next:
            kwargs.setdefault("_request_timeout", (self.timeout_s, self.timeout_s))
        try:
            return function(*args, **kwargs)
        except ApiException as error:
            what = f"{error.status} {error.reason}"
            raise (Expired if error.status == 410 else ClusterError)(call, what, error.status) from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise ClusterError(call, f"{type(error).__name__}: {str(error)[:300]}", None) from None


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"
