"""The chart starts what exists: commands, options, variables; the script of the bundled server runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace import demo
from headrace.connections.net import free_port
from headrace.connections.redis_client import connect
from headrace.connections.variables import redis_url
from headrace.demo import __main__ as demo_command
from headrace.local import valkey_server
from headrace_trainer.distributed import heartbeat
from scripts.kube_tools import ROOT, HelmFailed
from tests.deploy.helm import charts, pitfalls
from tests.deploy.helm.objects import Pod, of_kind, pods
from tests.waiting import until

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
SOURCES = [*(ROOT / "headrace").rglob("*.py"), *(ROOT / "services").rglob("*.py")]


def commands() -> dict[tuple[str, ...], list[str]]:
    """Options that the chart gives to each command of ours, by the words that start it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for preset in ("ci/demo-cpu.yaml", "ci/everything.yaml"):
        for pod in pods(charts.rendered(preset)):
            for container in pod.containers:
                words = [*container["command"], *container.get("args", [])]
                start = [w for w in words if not w.startswith("--")]
                if words[0] in SCRIPTS or words[:3] == ["python3", "-P", "-m"]:
                    found.setdefault(tuple(start), []).extend(w for w in words if w.startswith("--"))
    return found


def test_every_service_is_started() -> None:
    started = {words[0] for words in commands()}
    assert started == {
        "python3",
        "headrace-rollouter",
        "headrace-trainer",
        "headrace-queue",
        "headrace-coordinator",
    }
    modules = {words[3] for words in commands() if words[0] == "python3"}
    assert modules == {"headrace.demo", "headrace.connections.reachable"}


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_commands_have_these_options(words: tuple[str, ...]) -> None:
    module = words[3] if words[0] == "python3" else SCRIPTS[words[0]].split(":")[0]
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    known = set(re.findall(r"--[a-z-]+", done.stdout))
    given = {option.split("=")[0] for option in commands()[words]}
    assert given <= known, f"{' '.join(words)} knows no {given - known}"


def test_variables_are_ones_that_somebody_reads() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    names = {
        variable["name"]
        for preset in charts.ALL
        for pod in pods(charts.rendered(preset))
        for container in pod.containers
        for variable in container.get("env", [])
        if variable["name"].startswith("HEADRACE_")
    }
    assert {"HEADRACE_TLS_CERT", "HEADRACE_REDIS_PASSWORD"} <= names
    assert {name for name in names if f'"{name}"' not in text} == set()


def test_the_run_directory_is_on_the_volume() -> None:
    objects = charts.rendered("ci/demo-cpu.yaml")
    for pod in pods(objects):
        if pod.component in ("trainer", "queue"):
            directory = variable(pod, "HEADRACE_RUN_DIR")
            assert directory == f"/runs/{pitfalls.run_config(objects)['name']}"
            assert "/runs" in [m["mountPath"] for m in pod.spec["containers"][0]["volumeMounts"]]
    alone = charts.rendered()
    (queue,) = [pod for pod in pods(alone) if pod.component == "queue"]
    assert variable(queue, "HEADRACE_RUN_DIR") is None, "another node may not mount a ReadWriteOnce volume"


def variable(pod: Pod, name: str) -> str | None:
    found: list[str] = [e["value"] for e in pod.spec["containers"][0]["env"] if e["name"] == name]
    return found[0] if found else None


def test_probes_ask_paths_that_exist() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    for pod in pods(charts.rendered()):
        for container in pod.containers:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                path = container.get(probe, {}).get("httpGet", {}).get("path")
                assert path is None or f'@app.get("{path}"' in text


def test_the_engine_may_answer_within_the_probes_deadline() -> None:
    """The engine's own check waits up to 30 s; a probe that gives up earlier would kill a busy engine."""
    (rollouter,) = [pod for pod in pods(charts.rendered()) if pod.component == "rollouter"]
    source = (ROOT / "services/rollouter/headrace_rollouter/inference/engine.py").read_text()
    (own,) = re.findall(r"self\._llm\.is_paused\(\), ([0-9.]+)\)", source)
    probe = rollouter.spec["containers"][0]["livenessProbe"]
    assert probe["timeoutSeconds"] > float(own)
    assert rollouter.spec["containers"][0]["startupProbe"]["failureThreshold"] * 10 == 2700


def test_the_trainers_probes_read_what_it_writes(tmp_path: Path) -> None:
    """The command as it stands, on a directory where a launcher's heartbeat is, and gets old."""
    (trainer,) = [pod for pod in pods(charts.rendered()) if pod.component == "trainer"]
    container = trainer.spec["containers"][0]
    liveness, startup = container["livenessProbe"], container["startupProbe"]
    words = liveness["exec"]["command"]
    assert startup["exec"]["command"] == words, (
        "what an earlier container left fails it until the launcher is there"
    )
    (there,) = [w.partition("=")[2] for w in container["args"] if w.startswith("--heartbeat=")]
    assert words[4] == there
    assert Path(there).parent.as_posix() in [m["mountPath"] for m in container["volumeMounts"]]
    here = [sys.executable, *(str(tmp_path / "beats") if w == there else w for w in words[1:])]

    def passes() -> bool:
        return subprocess.run(here, check=False, stderr=subprocess.DEVNULL).returncode == 0

    assert not passes()
    heartbeat.Launch(tmp_path / "beats")
    assert passes()
    for age, alive in ((1700, True), (1900, False)):
        os.utime(tmp_path / "beats" / "launcher", (time.time() - age,) * 2)
        assert passes() == alive
    assert words[-1] == "--stale-seconds=1800"


def test_a_trainer_without_probes() -> None:
    (trainer,) = [
        p
        for p in pods(charts.rendered(sets=("trainer.liveness.staleSeconds=0",)))
        if p.component == "trainer"
    ]
    assert not {"livenessProbe", "startupProbe"} & set(trainer.spec["containers"][0])
    with pytest.raises(HelmFailed, match="staleSeconds"):
        charts.text(sets=("trainer.liveness.staleSeconds=5",))


def test_a_demo_has_a_name_that_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the init container makes lies where the configuration says."""
    folder = tmp_path / "spell_backward-seed0-0123"
    made = demo.DemoAssets(folder / "model", folder / "train.jsonl", folder / "val.jsonl")
    folder.mkdir()
    for path in (made.model_dir, made.train_file, made.val_file):
        path.touch()
    monkeypatch.setattr(demo_command, "prepare", lambda *_, **__: made)
    monkeypatch.setattr(demo_command, "held_out_exact_match", lambda _: 0.25)
    for _ in range(2):  # a pod's init container may run again
        demo_command.main(["--cache-dir", str(tmp_path), "--link", str(tmp_path / "current")])
    objects = charts.rendered("ci/demo-cpu.yaml")
    (pod,) = [p for p in pods(objects) if p.component == "queue"]
    (made_by,) = pod.spec["initContainers"]
    assert made_by["command"][-2:] == ["--cache-dir=/demo", "--link=/demo/current"]
    config = pitfalls.run_config(objects)
    for path in (config["model"]["path"], *config["data"]["train_files"], *config["data"]["val_files"]):
        assert (tmp_path / Path(path).relative_to("/demo")).exists(), path


# -- the bundled server -------------------------------------------------------------------------------

PASSWORD = "p@ss w\"ord'\\$(x)/é#"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The StatefulSet's script on a real server, on a port and in a folder of our own; yields its address."""
    objects = charts.rendered("ci/demo-cpu.yaml")
    (workload,) = of_kind(objects, "StatefulSet")
    (settings,) = [o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"] == "demo-redis"]
    container: dict[str, Any] = workload["spec"]["template"]["spec"]["containers"][0]
    port = free_port()
    conf = (
        settings["data"]["valkey.conf"]
        .replace("port 6379", f"port {port}")
        .replace("dir /data", f"dir {tmp_path}")
    )
    (tmp_path / "valkey.conf").write_text(conf + "\nbind 127.0.0.1\n")
    (tmp_path / "valkey-server").symlink_to(valkey_server.server_binary(tmp_path))
    script = container["args"][0].replace("/etc/valkey/", f"{tmp_path}/")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HEADRACE_REDIS_PASSWORD": PASSWORD}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*container["command"], script], env=env, stdout=log, stderr=log)
    monkeypatch.setenv("HEADRACE_REDIS_URL", f"redis://127.0.0.1:{port}/0")
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", PASSWORD)
    try:
        assert process.poll() is None
        until(
            lambda: valkey_server.answers(redis_url()),
            f"the server; its log: {(tmp_path / 'log').read_text()}",
        )
        assert process.pid == valkey_server.process_id(redis_url()), "the shell has to become the server"
        command_line = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert PASSWORD not in command_line
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def test_the_bundled_server_keeps_everything_and_asks_for_any_password(server: str) -> None:
    with connect(redis_url()) as client:
        wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
        found = client.config_get(*wanted, "maxmemory")
        assert found == {**wanted, "maxmemory": str(512 * 2**20)}
    with connect(f"redis://{server}/0") as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_an_empty_password_is_refused(tmp_path: Path) -> None:
    (workload,) = of_kind(charts.rendered(), "StatefulSet")
    container = workload["spec"]["template"]["spec"]["containers"][0]
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert b"HEADRACE_REDIS_PASSWORD is empty" in done.stderr


def test_memory_of_the_server_is_below_its_limit() -> None:
    units = {"k": 1e3, "kb": 2**10, "m": 1e6, "mb": 2**20, "g": 1e9, "gb": 2**30, "": 1}
    for preset in charts.ALL:
        objects = charts.rendered(preset)
        for workload in of_kind(objects, "StatefulSet"):
            (settings,) = [o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"] == "demo-redis"]
            number, unit = re.findall(r"maxmemory (\d+)([kmgb]*)", settings["data"]["valkey.conf"])[0]
            limit = workload["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
            assert int(number) * units[unit] <= 0.8 * (pitfalls.quantity(limit) or 0), preset


def test_shell_words_of_the_notes() -> None:
    """The commands that an installation prints can be read by a shell."""
    notes = charts.notes("ci/demo-cpu.yaml")
    lines = [line.strip() for line in notes.splitlines() if line.strip().startswith(("kubectl", "helm "))]
    assert len(lines) >= 6
    assert all(shlex.split(line) for line in lines)
