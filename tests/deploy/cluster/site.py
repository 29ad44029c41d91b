"""A cluster, by the commands that docs/kubernetes.md shows: kubectl and helm, in one namespace."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts import kube_tools
from scripts.manifests import CHART
from tests.deploy.cluster.judge import Broken

COMPONENTS = ("queue", "coordinator", "trainer", "rollouter")
MINE = "headrace/test-cluster"
"""Label of a namespace that was made here."""
_CALL_S = 120.0
_FETCH = (
    "import sys, urllib.request as r; "
    "print(r.build_opener(r.ProxyHandler({})).open(sys.argv[1], timeout=20).read().decode())"
)
_GENERATED = "headrace_samples_generated_total"
_NOT_OURS = ("configmap/kube-root-ca.crt", "configmap/openshift-service-ca.crt")


class NoAnswer(Exception):
    """A pod is just being replaced, or the API does not answer: to be asked again."""


@dataclass
class Site:
    namespace: str
    release: str
    values: Sequence[Path]
    sets: dict[str, Any]
    """By key, what goes before the files of values; an upgrade adds to it."""
    context: str | None = None
    made: bool = field(default=False, init=False)
    """Whether the namespace was made here."""

    # -- programs --------------------------------------------------------------------------------

    def kubectl(self, *words: str, timeout_s: float = _CALL_S, stdin: str | None = None) -> str:
        """Standard output. Raises NoAnswer with what it said."""
        program = shutil.which("kubectl") or str(kube_tools.kubectl())
        where = ["--context", self.context] if self.context else []
        return _run([program, *where, "--namespace", self.namespace, *words], timeout_s, stdin)

    def helm(self, *words: str, timeout_s: float = _CALL_S) -> str:
        program = shutil.which("helm") or str(kube_tools.helm())
        where = ["--kube-context", self.context] if self.context else []
        return _run([program, *where, "--namespace", self.namespace, *words], timeout_s, None)

    def chart_words(self, more: Mapping[str, Any] | None = None) -> list[str]:
        """Release, chart and values, for install and upgrade."""
        words = [self.release, str(CHART)]
        words += [word for path in self.values for word in ("--values", str(path))]
        for key, value in {**self.sets, **(more or {})}.items():
            words += ["--set-json", f"{key}={json.dumps(value)}"]
        return words

    # -- the namespace ---------------------------------------------------------------------------

    def take(self) -> None:
        """Make the namespace, or take an empty one. Raises Broken for one in which something is."""
        if not self.kubectl("get", "namespace", self.namespace, "--ignore-not-found", "--output=name"):
            made = {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": self.namespace,
                    "labels": {MINE: "true", "pod-security.kubernetes.io/enforce": "restricted"},
                },
            }
            self.kubectl("create", "--filename=-", stdin=json.dumps(made))
            self.made = True
            return
        kinds = "pods,services,deployments,statefulsets,configmaps,secrets,persistentvolumeclaims"
        there = [n for n in self.kubectl("get", kinds, "--output=name").split() if n not in _NOT_OURS]
        if there:
            raise Broken(
                f"namespace {self.namespace} is in use ({', '.join(there[:5])}); name another one in "
                "NAMESPACE, which need not be there yet"
            )

    def leave(self) -> None:
        """Remove what was made, whether it works or not."""
        if self.made:
            self.kubectl("delete", "namespace", self.namespace, "--ignore-not-found", timeout_s=900)
            return
        self.helm("uninstall", self.release, "--ignore-not-found", "--wait", timeout_s=900)
        claims = (f"{self.release}-checkpoints", f"data-{self.release}-redis-0")
        self.kubectl("delete", "persistentvolumeclaim", *claims, "--ignore-not-found", timeout_s=300)

    # -- what is done ----------------------------------------------------------------------------

    def install(self, minutes: int) -> None:
        self.helm(
            "install", *self.chart_words(), "--wait", f"--timeout={minutes}m", timeout_s=60 * minutes + 60
        )

    def upgrade(self, changes: Mapping[str, Any]) -> None:
        """Returns once the API has taken it, not when pods are replaced."""
        self.helm("upgrade", *self.chart_words(changes))
        self.sets.update(changes)

    def refuses(self, changes: Mapping[str, Any]) -> str:
        """What the chart says to an upgrade that it must not let through. Raises Broken where it does."""
        try:
            self.helm("upgrade", *self.chart_words(changes))
        except NoAnswer as refused:
            return str(refused)
        raise Broken(f"an upgrade was let through that changes what the run was begun with: {dict(changes)}")

    def scale(self, rollouters: int) -> None:
        self.kubectl("scale", f"deployment/{self.release}-rollouter", f"--replicas={rollouters}")

    def delete(self, pod: str) -> None:
        self.kubectl("delete", "pod", pod, "--wait=false")

    def restart_everything(self) -> None:
        self.kubectl(
            "rollout", "restart", "deployment,statefulset",
            f"--selector=app.kubernetes.io/instance={self.release}",
        )  # fmt: skip

    def test(self) -> None:
        self.helm("test", self.release, timeout_s=300)

    def uninstall(self) -> list[str]:
        """Returns the volume claims that stay."""
        self.helm("uninstall", self.release, "--wait", "--timeout=10m", timeout_s=660)
        return sorted(self.kubectl("get", "persistentvolumeclaim", "--output=name").split())

    # -- what is seen ----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._port('queue', 'http')}/stats"
        return json.loads(self._exec(f"deployment/{self.release}-queue", "python3", "-c", _FETCH, url))  # type: ignore[no-any-return]

    def status(self) -> dict[str, Any]:
        return self._headrace("status")

    def audit(self) -> dict[str, Any]:
        return self._headrace("audit")

    def _headrace(self, command: str) -> dict[str, Any]:
        where = (f"deployment/{self.release}-trainer", "headrace", command, f"/runs/{self.release}")
        return json.loads(self._exec(*where, "--json"))  # type: ignore[no-any-return]

    def generated(self, pod: str) -> int:
        """Samples that this rollouter has finished."""
        url = f"http://127.0.0.1:{self._port('rollouter', 'http')}/metrics"
        text = self._exec(f"pod/{pod}", "python3", "-c", _FETCH, url)
        return int(sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(_GENERATED)))

    def pods(self, component: str) -> dict[str, bool]:
        """Names of those that are not about to go, and whether each is ready."""
        return {name: ready for name, _, ready in self._pods(f",app.kubernetes.io/component={component}")}

    def all_pods(self) -> dict[str, bool]:
        """The same of every component, by name and uid: one of a StatefulSet has the name of the last."""
        return {f"{name} {uid}": ready for name, uid, ready in self._pods("")}

    def _pods(self, more: str) -> Iterator[tuple[str, str, bool]]:
        selector = f"--selector=app.kubernetes.io/instance={self.release}{more}"
        for pod in json.loads(self.kubectl("get", "pods", selector, "--output=json"))["items"]:
            meta, status = pod["metadata"], pod["status"]
            if "deletionTimestamp" not in meta and status.get("phase") not in ("Succeeded", "Failed"):
                conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
                yield meta["name"], meta["uid"], conditions.get("Ready") == "True"

    def rollouters(self) -> int:
        """How many there are to be."""
        found = self.kubectl("get", f"deployment/{self.release}-rollouter", "--output=json")
        return int(json.loads(found)["spec"]["replicas"])

    def tell_what_is_there(self) -> None:
        """For whoever has to find out what went wrong."""
        for words in (
            ("get", "pods", "--output=wide"),
            ("get", "events", "--sort-by=.metadata.creationTimestamp"),
            *(
                ("logs", f"deployment/{self.release}-{component}", "--all-containers", "--tail=40")
                for component in COMPONENTS
            ),
        ):
            print(f"test-cluster: kubectl {' '.join(words)}", file=sys.stderr)
            try:
                print(self.kubectl(*words), file=sys.stderr)
            except NoAnswer as error:
                print(error, file=sys.stderr)

    def _port(self, component: str, name: str) -> int:
        table = yaml.safe_load((CHART / "flows.yaml").read_text())
        return int(table["ports"][component][name])

    def _exec(self, where: str, *words: str) -> str:
        return self.kubectl("exec", where, "--", *words)


def _run(words: list[str], timeout_s: float, stdin: str | None) -> str:
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{' '.join(words)}: no end within {timeout_s:g} s") from None
    if done.returncode:
        raise NoAnswer(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
