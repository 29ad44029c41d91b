"""The release workflow, step by step: what it publishes is what the chart it publishes asks for.

Its shell commands are run as they are there, with a program in docker's place. The chart goes to a real
registry on this machine (Debian's docker-registry) and is rendered from there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import headrace
from headrace.connections.net import bound_socket
from headrace.local.services import http_ok
from scripts.kube_tools import ROOT, helm, run_helm
from tests.deploy.docker.dockerfiles import BY_DEVICE, SERVICES
from tests.deploy.helm.objects import pods, read
from tests.docs_commands import PAGES
from tests.waiting import until

WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
VERSION = headrace.__version__
CHART = yaml.safe_load((ROOT / "helm" / "headrace" / "Chart.yaml").read_text())
GITHUB = {
    "GITHUB_REF_NAME": f"v{VERSION}",
    "GITHUB_REPOSITORY_OWNER": "Some-Team",
    "GITHUB_ACTOR": "somebody",
}
OURS = "ghcr.io/some-team"


def step(job: str, name: str) -> dict[str, Any]:
    (found,) = [step for step in JOBS[job]["steps"] if step.get("name", "").startswith(name)]
    return found


def run(job: str, name: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A step's commands, in this working copy, as a runner's shell runs them."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step(job, name)["run"]],
        cwd=ROOT, env={**os.environ, **GITHUB, **environ},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_versions_agree() -> None:
    """One place says it, `headrace/__init__.py`: the package is built with it, the chart and its images' tags
    follow, and so do the commands that README and docs show."""
    assert CHART["version"] == CHART["appVersion"] == VERSION == version("headrace")
    shown = [re.findall(r"(?:TAG=|--version |:)(\d+\.\d+\.\d+)", page.read_text()) for page in PAGES]
    assert {found for page in shown for found in page} == {VERSION}
    assert run("versions", "The tag").returncode == 0
    assert run("versions", "The tag", GITHUB_REF_NAME="v9.9.9").returncode != 0


def test_the_chart_comes_after_its_images_and_only_what_pushes_may_write() -> None:
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as a truth value
    assert (JOBS["images"]["needs"], JOBS["chart"]["needs"]) == ("versions", "images")
    assert WORKFLOW["permissions"] == {"contents": "read"}
    writes = {name for name, job in JOBS.items() if "write" in job.get("permissions", {}).values()}
    assert writes == {"images", "chart"}
    assert all(job["timeout-minutes"] for job in JOBS.values())


def test_actions_are_pinned_by_commit() -> None:
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert len(used) >= 3
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used)


def pushed(folder: Path) -> dict[str, set[str]]:
    """The images that the workflow pushes, by the variant that its matrix names."""
    (folder / "docker").write_text(f'#!/bin/sh\necho "$@" >> "{folder}/calls"\n')
    (folder / "docker").chmod(0o755)
    found: dict[str, set[str]] = {}
    for row in JOBS["images"]["strategy"]["matrix"]["include"]:
        (folder / "calls").unlink(missing_ok=True)
        given = {
            name: row[re.findall(r"matrix\.(\w+)", value)[0]]
            for name, value in step("images", "Build and push")["env"].items()
        }
        done = run("images", "Build and push", PATH=f"{folder}:{os.environ['PATH']}", **given)
        assert done.returncode == 0, done.stderr
        calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
        assert all("--push" in call and "--sbom=true" in call for call in calls)
        for call in calls:
            assert (ROOT / call[call.index("-f") + 1]).exists()
        assert sum(f"DEVICE={row['device']}" in call for call in calls) == len(BY_DEVICE)
        found[row["variant"]] = {call[call.index("-t") + 1] for call in calls}
    return found


def asked_for(*words: str) -> set[str]:
    """Images of ours in what Helm renders."""
    made = pods(read(run_helm("template", "math", *words)))
    return {c["image"] for pod in made for c in pod.containers if "/headrace/" in c["image"]}


def test_the_packaged_chart_asks_for_the_images_that_are_pushed(tmp_path: Path) -> None:
    done = run(
        "chart",
        "Package",
        HELM=str(stand_in(tmp_path, "push", "exit 0")),
        TOKEN="t",
        FOLDER=str(tmp_path / "dist"),
    )
    assert done.returncode == 0, done.stderr
    archive = tmp_path / "dist" / f"headrace-{VERSION}.tgz"
    by_variant = pushed(tmp_path)
    assert set(by_variant) == {"", "-cpu"}
    for variant, images in by_variant.items():
        values = ROOT / "helm/headrace" / ("ci/demo-cpu.yaml" if variant else "examples/one-node-8-gpus.yaml")
        # The demo's values name the tag that its page builds.
        with_ = ("--set", f"image.tag=,image.variant={variant}", "--values", str(values))
        assert asked_for(str(archive), *with_) == images == {
            f"{OURS}/headrace/{service}:{VERSION}{variant}" for service in SERVICES
        }  # fmt: skip


def test_a_chart_whose_values_have_no_place_for_the_registry_is_refused(tmp_path: Path) -> None:
    for name in ("scripts", "helm"):
        shutil.copytree(ROOT / name, tmp_path / name)
    values = tmp_path / "helm" / "headrace" / "values.yaml"
    values.write_text(values.read_text().replace('registry: ""', "registry: other"))
    done = subprocess.run(
        ["sh", tmp_path / "scripts" / "package_chart.sh", OURS, tmp_path / "dist"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "values.yaml has no empty image.registry to fill" in done.stderr


def stand_in(folder: Path, *cases: str) -> Path:
    """Helm, but for logins, which succeed, and what `cases` (a subcommand and its commands) say."""
    own = "".join(f"{name}) {what} ;;\n" for name, what in zip(cases[::2], cases[1::2], strict=True))
    program = folder / "helm"
    program.write_text(
        f'#!/bin/sh\ncase $1 in\nregistry) cat >/dev/null ;;\n{own}*) exec {helm()} "$@" ;;\nesac\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Host and port of a real registry of OCI artefacts."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no docker-registry on PATH: apt-get install docker-registry")
    with bound_socket("127.0.0.1", 0) as free:
        host = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": host},
    }
    (tmp_path / "registry.yaml").write_text(yaml.safe_dump(settings))
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen([program, "serve", tmp_path / "registry.yaml"], stdout=log, stderr=log)
        try:
            until(lambda: http_ok(f"http://{host}/v2/"), "the registry to answer", 30.0)
            yield host
        finally:
            process.kill()
            process.wait(10)


def test_the_chart_is_pushed_and_installed_from_a_registry(registry: str, tmp_path: Path) -> None:
    push = f'exec {helm()} push "$2" "$(echo "$3" | sed "s|ghcr.io|{registry}|")" --plain-http'
    done = run(
        "chart",
        "Package",
        HELM=str(stand_in(tmp_path, "push", push)),
        TOKEN="t",
        FOLDER=str(tmp_path / "dist"),
    )
    assert done.returncode == 0, done.stderr
    there = f"oci://{registry}/some-team/charts/headrace"
    run_helm("pull", there, "--version", VERSION, "--plain-http", "--untar", "--destination", str(tmp_path))
    values = tmp_path / "headrace" / "examples" / "one-node-8-gpus.yaml"
    assert asked_for(there, "--version", VERSION, "--plain-http", "--values", str(values)) == {
        f"{OURS}/headrace/{service}:{VERSION}" for service in SERVICES
    }
