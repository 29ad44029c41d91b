"""The Dockerfiles, read as a registry's scanner and as the kubelet would, and their locks in practice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from headrace.valkey_server import start_valkey
from tests.docker.environments import DOCKER, PACKAGES, ROOT, SERVICES, bare, build_context, install
from tests.integration.queue_process import write_tokenizer
from tests.waiting import until

FILES = {service: DOCKER / f"Dockerfile.{service}" for service in SERVICES}
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def last_stage(text: str) -> list[str]:
    """The instructions of the stage that becomes the image, continued lines joined, comments gone."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    lines = [line for line in joined.splitlines() if line.strip()]
    start = max(i for i, line in enumerate(lines) if line.startswith("FROM "))
    return lines[start:]


def test_the_locks_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/service_locks.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_hadolint_finds_nothing(service: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, FILES[service]], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_the_image_suits_a_restricted_pod(service: str) -> None:
    stage = last_stage(FILES[service].read_text())
    users = [line.split()[1] for line in stage if line.startswith("USER ")]
    assert users, "no USER: it would run as root"
    uid, _, gid = users[-1].partition(":")
    # The kubelet can only tell that a numeric user is not root.
    assert int(uid) > 0
    assert int(gid) > 0
    entry = next(line for line in stage if line.startswith("ENTRYPOINT "))
    words = json.loads(entry.removeprefix("ENTRYPOINT "))  # exec form: signals reach the service itself
    assert words == [f"headrace-{service}"]
    assert words[0] in SCRIPTS
    assert any(re.search(r"\bHOME=/tmp\b", line) for line in stage), "the home must be on a mount"
    assert not [line for line in stage if re.search(r"(?i)(token|password|secret)=", line)]


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_copied_is_there(service: str, tmp_path: Path) -> None:
    context = build_context(tmp_path)
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", FILES[service].read_text(), re.MULTILINE)
    assert copied
    for name in " ".join(copied).split():
        assert (context / name).exists(), f".dockerignore keeps {name} out"
    for needed in (
        "headrace/ledger/lua/take.lua",
        f"services/{'sync-' * (service == 'coordinator')}{service}",
    ):
        assert (context / needed).exists()
    assert not (context / "tests").exists()


def test_queue_and_coordinator_come_without_torch() -> None:
    for service in ("queue", "coordinator"):
        lock = (DOCKER / "locks" / f"{service}.txt").read_text()
        assert not re.search(r"^(torch|vllm\S*|triton)==", lock, re.MULTILINE)
    assert not re.search(r"^vllm", (DOCKER / "locks" / "trainer.txt").read_text(), re.MULTILINE)


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
                words = ["--config", tmp_path / "run.yaml", "--port", "0"]
                python = install(service, tmp_path / service, context)
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
