"""`make images` and `make images-pin`, with a program that stands in for docker and writes down its calls."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.kube_tools import run_helm
from tests.deploy.docker.dockerfiles import BY_DEVICE, DOCKER, ROOT, SERVICES, arguments, text_of
from tests.deploy.helm.objects import pods, read

BASES = dict(
    line.split("=", 1) for line in (DOCKER / "bases.env").read_text().splitlines() if not line.startswith("#")
)


def test_the_bases_are_in_one_file_with_the_tags_of_the_dockerfiles() -> None:
    """By digest where one is known; none is known of vLLM's image."""
    defaults = {name: value for service in SERVICES for name, value in arguments(text_of(service)).items()}
    del defaults["DEVICE"]
    assert {name: image.partition("@")[0] for name, image in BASES.items()} == defaults
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", BASES["PYTHON_IMAGE"].partition("@")[2])


def docker_calls(folder: Path, words: list[str], says: str = "") -> list[list[str]]:
    """What a `make` with `words` calls docker with; a program that prints `says` stands in for it."""
    (folder / "docker").write_text(f'#!/bin/sh\necho "$@" >> "{folder}/calls"\n{says}\n')
    (folder / "docker").chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if k not in BASES}
    subprocess.run(
        ["make", "-s", *words], cwd=ROOT, env={**environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return [line.split() for line in (folder / "calls").read_text().splitlines()]


def test_make_images_gives_each_file_the_arguments_that_it_knows(tmp_path: Path) -> None:
    """docker warns of others."""
    calls = docker_calls(tmp_path, ["images", "DEVICE=cpu", "TAG=1"])
    for service, call in zip(SERVICES, calls, strict=True):
        assert call[:3] == ["build", "-f", f"docker/Dockerfile.{service}"]
        given = dict(word.split("=", 1) for before, word in pairwise(call) if before == "--build-arg")
        known = arguments(text_of(service))
        assert given == {name: {**BASES, "DEVICE": "cpu"}[name] for name in known}


def test_a_base_of_ones_own_wins(tmp_path: Path) -> None:
    calls = docker_calls(tmp_path, ["images", "PYTHON_IMAGE=mirror/python:3.11@sha256:0"])
    assert all("PYTHON_IMAGE=mirror/python:3.11@sha256:0" in call for call in calls)
    assert f"VLLM_IMAGE={BASES['VLLM_IMAGE']}" in calls[-1]


def test_images_of_both_devices_have_the_tags_that_the_chart_asks_for(tmp_path: Path) -> None:
    calls = docker_calls(tmp_path, ["images", "DEVICE=all", "TAG=1.2", "REGISTRY=r.example/headrace"])
    built = {call[call.index("-t") + 1]: "DEVICE=cuda" in call for call in calls if "DEVICE" in str(call)}
    for service in BY_DEVICE:
        assert built[f"r.example/headrace/{service}:1.2"]
        assert not built[f"r.example/headrace/{service}:1.2-cpu"]
    assert len(calls) == 2 * len(SERVICES)
    pulled = {
        container["image"]
        for pod in pods(read(run_helm(
            "template", "x", str(ROOT / "helm" / "headrace"), "--set", "image.tag=1.2,image.variant=-cpu",
            "--set", "image.registry=r.example", "--values", str(ROOT / "helm/headrace/ci/demo-cpu.yaml"),
        )))
        for container in pod.containers
    }  # fmt: skip
    assert {f"r.example/headrace/{service}:1.2-cpu" for service in SERVICES} <= pulled


def test_what_is_pushed_has_an_sbom_and_its_provenance(tmp_path: Path) -> None:
    calls = docker_calls(tmp_path, ["images", "PUSH=1", "REGISTRY=r.example/headrace"])
    assert len(calls) == len(SERVICES)
    for call in calls:
        assert call[:2] == ["buildx", "build"]
        assert {"--push", "--sbom=true", "--provenance=mode=max"} <= set(call)


def test_a_failed_build_ends_the_rest(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        docker_calls(tmp_path, ["images", "DEVICE=all"], says="exit 1")
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_another_device_is_refused() -> None:
    done = subprocess.run(
        ["make", "-s", "images", "DEVICE=tpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode
    assert "DEVICE=tpu; it is cuda, cpu or all" in done.stderr


def test_pinning_writes_the_digests_of_today(tmp_path: Path) -> None:
    digest = "sha256:" + "ab" * 32
    (tmp_path / "docker").write_text(f"#!/bin/sh\necho {digest}\n")
    (tmp_path / "docker").chmod(0o755)
    file = tmp_path / "bases.env"
    file.write_text((DOCKER / "bases.env").read_text())
    subprocess.run(
        ["sh", "scripts/pin_bases.sh", file], cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True, timeout=60,
    )  # fmt: skip
    before, after = (DOCKER / "bases.env").read_text().splitlines(), file.read_text().splitlines()
    assert [line for line in before if line.startswith("#")] == [line for line in after if line[0] == "#"]
    pinned = {name: f"{image.partition('@')[0]}@{digest}" for name, image in BASES.items()}
    assert dict(line.split("=", 1) for line in after if line[0] != "#") == pinned
