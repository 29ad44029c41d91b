"""Pods as processes of this machine: containers' commands, variables and files as a manifest gives them.

What a kubelet would do, and no more: init containers first, `$(NAME)` and `valueFrom` filled in, volumes as
folders. Paths of volumes become folders below one of the test's, names of Services one address.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.helm.objects import Object, Pod, of_kind, pods
from tests.listeners import Listener, listeners, open_unix_sockets, tree_of

SECRETS = "/etc/headrace/secrets"
_END_S = 60.0
_PROBE_S = 30.0
"""More than a kubelet's: how busy this machine is says nothing about the pod."""


class LocalPods:
    def __init__(
        self,
        objects: Sequence[Object],
        folder: Path,
        volumes: dict[str, Path],
        address: str = "127.0.0.1",
    ) -> None:
        """`volumes`: folders for absolute paths; those of a pod's own (scratch, tmp) are made here.
        `address`: every pod's and every Service's, one of this machine."""
        self.folder = folder
        self.address = address
        self._pods = {pod.component: pod for pod in pods(objects)}
        self._services = sorted((o["metadata"]["name"] for o in of_kind(objects, "Service")), reverse=True)
        self._secrets = {
            o["metadata"]["name"]: {k: base64.b64decode(v).decode() for k, v in o["data"].items()}
            for o in of_kind(objects, "Secret")
        }
        self._volumes = dict(volumes)
        for name, path in (("config", "/etc/headrace/config"), ("redis", "/etc/valkey")):
            (found,) = [
                o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"].endswith(f"-{name}")
            ]
            self._volumes[path] = folder / name
            self._volumes[path].mkdir()
            for file, text in found["data"].items():
                (self._volumes[path] / file).write_text(self._local(text))
        self._volumes[SECRETS] = folder / "secrets"
        self._volumes[SECRETS].mkdir()
        for pod in self._pods.values():
            self._write_secrets(pod)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, component: str) -> None:
        """Its init containers to their end, then all its containers; returns at once after that."""
        pod = self._pods[component]
        for container in pod.spec.get("initContainers", []):
            process = self._run(pod, container)
            assert process.wait(300) == 0, self.log(container["name"])
        for container in pod.spec["containers"]:
            self.running[container["name"]] = self._run(pod, container)

    def _write_secrets(self, pod: Pod) -> None:
        """Files of the projected volume, which is the same in every pod that has one."""
        for volume in pod.spec.get("volumes", []):
            for source in volume.get("projected", {}).get("sources", []):
                for item in source["secret"]["items"]:
                    value = self._secrets[source["secret"]["name"]][item["key"]]
                    (self._volumes[SECRETS] / item["path"]).write_text(value)

    def secret(self, component: str, name: str) -> str:
        """What a service of the pod finds in the file that the variable `name` names."""
        return Path(self.variables(component)[name]).read_text()

    def variables(self, component: str) -> dict[str, str]:
        """The environment of its main container."""
        pod = self._pods[component]
        return self._environment(pod, pod.spec["containers"][0])

    def options(self, component: str) -> list[str]:
        """The arguments of its main container."""
        return [self._local(word) for word in self._pods[component].spec["containers"][0]["args"]]

    def port(self, component: str, name: str) -> int:
        """On which its main container listens."""
        return self._pods[component].port_names[name]

    def ports(self, component: str) -> dict[int, str]:
        """Names of all on which its main container listens."""
        return {port: name for name, port in self._pods[component].port_names.items()}

    def execute(self, component: str, *words: str) -> tuple[int, str]:
        """`kubectl exec` in its main container: exit code, and all that is printed."""
        done = subprocess.run(
            [sys.executable if word == "python3" else self._local(word) for word in words],
            env=self.variables(component),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_END_S,
            check=False,
        )
        return done.returncode, done.stdout

    def probe(self, component: str, kind: str) -> str:
        """A probe of its main container, as a kubelet makes it: what is wrong, or ""."""
        pod = self._pods[component]
        probe = pod.spec["containers"][0][kind]
        match probe:
            case {"exec": {"command": words}}:
                code, said = self.execute(component, *words)
                return f"{code}: {said}" if code else ""
            case {"httpGet": {"path": path, "port": name}}:
                url = f"http://{self.address}:{pod.port_names[name]}{path}"
                answer = httpx.get(url, timeout=_PROBE_S, trust_env=False)
                return "" if answer.status_code == 200 else f"{path}: {answer.text}"
            case {"grpc": {"port": port}}:
                with grpc.insecure_channel(
                    f"{self.address}:{port}", [("grpc.enable_http_proxy", 0)]
                ) as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_S)
                return "" if reply.status == health_pb2.HealthCheckResponse.SERVING else str(reply)
        raise AssertionError(f"{component}: a kubelet knows more kinds of probes than these: {probe}")

    def doors(self) -> dict[str, tuple[set[Listener], set[str]]]:
        """By container that runs: where its processes listen, and its Unix sockets that others may use."""
        found = {}
        for name, process in self.running.items():
            pids = tree_of(process.pid)
            found[name] = listeners(pids), open_unix_sockets(pids)
        return found

    def ended(self) -> dict[str, int]:
        """Exit codes of the containers that ended by themselves."""
        codes = {name: process.poll() for name, process in self.running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def stop(self, name: str) -> int:
        """SIGTERM, as a kubelet sends it; the exit code."""
        process = self.running[name]
        process.send_signal(signal.SIGTERM)
        return process.wait(_END_S)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait(10)

    def _run(self, pod: Pod, container: dict[str, Any]) -> subprocess.Popen[bytes]:
        environment = self._environment(pod, container)
        words = [*container["command"], *container.get("args", [])]
        words = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in words]
        words = [self._local(word) for word in words]
        for name in ("scratch", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        if words[0] == "python3":
            words[0] = sys.executable
        with (self.folder / f"{container['name']}.log").open("ab") as log:
            return subprocess.Popen(words, env=environment, cwd=self.folder, stdout=log, stderr=log)

    def _environment(self, pod: Pod, container: dict[str, Any]) -> dict[str, str]:
        fields = {"metadata.name": f"{pod.component}-0", "status.podIP": self.address}
        out = {"PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        out |= {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                value = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                value = self._local(variable["value"])
            out[variable["name"]] = value
        return out

    def _local(self, text: str) -> str:
        """Paths of volumes and names of Services, as they are here."""
        places = {**self._volumes, "/scratch": self.folder / "scratch", "/tmp": self.folder / "tmp"}
        longest_first = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
        # In one pass: what a path has become may begin like another one.
        text = re.sub(rf"(?<![\w/.-])({longest_first})(?![\w-])", lambda found: str(places[found[1]]), text)
        for service in self._services:
            text = re.sub(rf"(?<![\w-]){re.escape(service)}(?=[:/])", self.address, text)
        return text
