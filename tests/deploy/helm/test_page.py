"""README.md, docs/kubernetes.md: Helm commands render, kubectl commands name what is there, values fit."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml
from kubernetes_validate import utils

from headrace.cli.main import parse
from headrace.config.redis_url import build
from headrace.local.valkey_server import answers, start_valkey
from scripts.kube_tools import ROOT, helm, kubectl, run_helm
from tests.deploy.helm import charts
from tests.deploy.helm.cluster import cluster
from tests.deploy.helm.objects import Object, pods, read
from tests.deploy.helm.pod_security import violations

PAGE = "\n".join((ROOT / page).read_text() for page in ("README.md", "docs/kubernetes.md"))


def lines(program: str) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(program + " ")]


def test_every_command_is_known() -> None:
    shown = sum(len(lines(program)) for program in ("helm", "kubectl", "kind", "make"))
    assert shown == sum(block.count("\n") for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize(
    "line", [line for line in lines("helm") if line.split()[1] in ("install", "upgrade")]
)
def test_installations_render(line: str) -> None:
    assert installed(line)


def installed(line: str) -> list[Object]:
    """What a shown installation or upgrade makes."""
    _, _, *words = shlex.split(line)
    words = [word for word in words if word not in ("--wait", "--create-namespace", "--force-conflicts")]
    at = words.index("--timeout") if "--timeout" in words else None
    if at is not None:
        del words[at : at + 2]
    words = [str(ROOT / word) if word.startswith("helm/") else word for word in words]
    with tempfile.TemporaryDirectory() as folder:
        for at, word in enumerate(words):
            if published := re.fullmatch(r"oci://(.+)/charts/headrace", word):
                # What the release publishes there, and what `helm pull --untar` leaves of it.
                version = words[words.index("--version") + 1]
                package(published[1], Path(folder))
                words[at] = f"{folder}/headrace-{version}.tgz"
                subprocess.run(["tar", "-xf", words[at], "-C", folder], check=True, timeout=60)
        words = [f"{folder}/{word}" if word.startswith("headrace/") else word for word in words]
        return read(run_helm("template", *words))


def package(registry: str, folder: Path) -> None:
    environ = {**os.environ, "HELM": str(helm())}
    words = ["sh", "scripts/package_chart.sh", registry, str(folder)]
    subprocess.run(words, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL, timeout=60)


def docker_calls(make: str, folder: Path) -> list[list[str]]:
    """What a shown `make` calls docker with, recorded by a program that stands in for it."""
    docker = folder / "docker"
    docker.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n')
    docker.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(shlex.split(make), cwd=ROOT, env={**os.environ, "PATH": path}, check=True, timeout=60)
    return [line.split() for line in (folder / "calls").read_text().splitlines()]


def of_page(page: str, program: str) -> list[str]:
    return [line for line in dict.fromkeys(lines(program)) if line in (ROOT / page).read_text()]


def test_what_the_readme_builds_is_pushed_and_pulled(tmp_path: Path) -> None:
    """Its lines fit together: image by image, registry and tag included."""
    (make,) = of_page("README.md", "make images")
    (install, published) = of_page("README.md", "helm install")
    assert make in of_page("docs/kubernetes.md", "make images")
    calls = docker_calls(make, tmp_path)
    built = [call[call.index("-t") + 1] for call in calls]
    pulled = {c["image"] for pod in pods(installed(install)) for c in pod.containers}
    assert len(built) == 4
    assert all("--push" in call for call in calls), "each of them"
    assert {image for image in pulled if "/headrace/" in image} == set(built)
    released = {c["image"] for pod in pods(installed(published)) for c in pod.containers}
    ours = {image.replace("registry.example/", "ghcr.io/OWNER/") for image in built}
    assert {image for image in released if "/headrace/" in image} == ours


def test_the_demos_images_stay_on_this_machine(tmp_path: Path) -> None:
    (make,), (install, *_) = lines("make images DEVICE=cpu"), lines("helm install demo")
    calls = docker_calls(make, tmp_path)
    assert {call[0] for call in calls} == {"build"}
    built = {call[call.index("-t") + 1] for call in calls}
    pulled = {c["image"] for pod in pods(installed(install)) for c in pod.containers}
    assert {image for image in pulled if image.startswith("headrace/")} == built
    (load,) = lines("kind load")
    assert set(shlex.split(load)[3:]) == built


def test_installations_wait_as_long_as_the_chart_says() -> None:
    """A model of many GPUs takes its time; what the notes say is what the pages show."""
    shown = [line for line in lines("helm install") if "examples/" in line]
    assert len(shown) == 5
    (timeout,) = re.findall(r"--wait --timeout (\w+)", charts.notes())
    assert all(f"--wait --timeout {timeout}" in line for line in shown)


def test_kubectl_names_what_is_there() -> None:
    there: dict[str, set[str]] = {}
    for release, preset in (("demo", "ci/demo-cpu.yaml"), ("math", "examples/one-node-8-gpus.yaml")):
        for thing in charts.rendered(preset, release):
            there.setdefault(thing["kind"].lower(), set()).add(thing["metadata"]["name"])
            there.setdefault("persistentvolumeclaim", set()).update(_claims(thing))
    for line in lines("kubectl"):
        words = shlex.split(line, comments=True)
        for word in words:
            for kind in ("deployment", "statefulset"):
                if word.startswith(f"{kind}/"):
                    assert word.removeprefix(f"{kind}/") in there[kind], line
        if words[2:3] == ["secret"] and words[1] in ("get", "patch"):
            assert words[3] in there["secret"], line
        if words[1:3] == ["delete", "pvc"]:
            assert set(words[5:]) <= there["persistentvolumeclaim"], line
        if words[1] == "apply":
            assert (ROOT / words[-1]).exists(), line
        if words[1:3] == ["create", "secret"]:
            given = {w.split("=")[1] for w in words if w.startswith("--from-literal")}
            assert given == {"token", "redis-password"}
    assert sum("deployment/" in line for line in lines("kubectl")) >= 2


def test_the_passwords_way_into_redis(tmp_path: Path) -> None:
    """What kubectl makes of the Secret is what the server understands as a second password."""
    (line,) = [line for line in lines("kubectl") if "ACL SETUSER" in line]
    get, _, execute = line.partition(" | kubectl ")
    objects = charts.rendered("examples/one-node-8-gpus.yaml", "math")
    (server,) = [pod for pod in pods(objects) if pod.component == "redis"]
    (container,) = server.containers
    pod_name = f"{server.owner['metadata']['name']}-0"
    assert shlex.split(execute)[-4:] == ["rl", pod_name, "--", "valkey-cli"]
    variables = {variable["name"] for variable in container["env"]}
    assert "REDISCLI_AUTH" in variables, "valkey-cli logs in by it"
    assert container["ports"] == [{"name": "redis", "containerPort": 6379}], "valkey-cli's own"
    (secret,) = [thing for thing in objects if thing["kind"] == "Secret"]
    new = base64.b64decode(secret["data"]["redis-password"]).decode()
    with cluster(objects, tmp_path) as kubeconfig:
        words = [str(kubectl()), f"--kubeconfig={kubeconfig}", *shlex.split(get)[1:]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with start_valkey(tmp_path / "redis", "old") as running:
        with socket.create_connection(("127.0.0.1", running.port), 10) as connection:
            connection.sendall(f"AUTH old\r\n{done.stdout}QUIT\r\n".encode())
            assert connection.makefile("rb").read() == b"+OK\r\n" * 3
        for password in ("old", new):
            assert answers(build("127.0.0.1", running.port, password)), password


def test_commands_in_pods_are_headraces() -> None:
    found = [line.partition(" -- headrace ")[2] for line in lines("kubectl") if " -- headrace " in line]
    for command in found:
        args = parse(shlex.split(command.partition(" > ")[0]))
        assert "/runs/math" in (getattr(args, "run", None), *getattr(args, "runs", []))
    assert found


def test_the_pod_that_holds_the_volume() -> None:
    """`kubectl run` merges the overrides into a pod whose container has the pod's name."""
    (line,) = [line for line in lines("kubectl") if line.split()[1] == "run"]
    words = shlex.split(line)
    name = words[2]
    options = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    spec = json.loads(options["overrides"])["spec"]
    (container,) = spec["containers"]
    assert container["name"] == name
    container |= {"image": options["image"], "args": words[words.index("--") + 1 :]}
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"run": name}},
        "spec": spec,
    }
    utils.validate(made, "1.29", strict=True)
    (pod,) = pods([made])
    assert list(violations(pod)) == []
    (trainer,) = [
        p for p in pods(charts.rendered("examples/one-node-8-gpus.yaml", "math")) if p.component == "trainer"
    ]
    assert options["image"] == f"registry.example/{trainer.spec['containers'][0]['image']}", (
        "as installed above"
    )
    assert spec["securityContext"] == trainer.spec["securityContext"], "what it reads is the trainer's"
    assert all(volume in trainer.spec["volumes"] for volume in spec["volumes"])
    assert all(mount in trainer.spec["containers"][0]["volumeMounts"] for mount in container["volumeMounts"])


def _claims(thing: Object) -> set[str]:
    made = thing["spec"].get("volumeClaimTemplates", []) if thing["kind"] == "StatefulSet" else []
    return {f"{template['metadata']['name']}-{thing['metadata']['name']}-0" for template in made}


@pytest.mark.parametrize("block", re.findall(r"```yml\n(.*?)```", PAGE, re.DOTALL))
def test_values_are_values(block: str, tmp_path: Path) -> None:
    assert yaml.safe_load(block)
    (tmp_path / "values.yaml").write_text(block)
    assert read(run_helm("template", "demo", str(charts.CHART), "--values", str(tmp_path / "values.yaml")))


def test_the_page_lists_the_rights() -> None:
    (role,) = [o for o in charts.rendered("ci/keda.yaml") if o["kind"] == "Role"]
    expected = [
        [rule["apiGroups"][0] or "core", rule["resources"][0], ", ".join(rule["verbs"])]
        for rule in role["rules"]
    ]
    table = PAGE.split("| group | resource | verbs |")[1].split("\n\n")[0].strip().splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    shown = [[group.strip("`"), re.findall(r"`(.+?)`", what)[0], verbs] for group, what, verbs in rows]
    assert shown == expected
    named = {rule["resources"][0] for rule in role["rules"] if rule.get("resourceNames")}
    assert named == {"deployments", "deployments/scale"}
