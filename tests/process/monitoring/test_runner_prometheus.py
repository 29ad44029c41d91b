"""The Prometheus beside a local run: what it scrapes, what it is told, and that nothing hangs on it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from headrace.config.loading import ConfigError
from headrace.local import prometheus
from headrace.local.processes import ProcessState
from headrace.local.prometheus import BINARY, LocalPrometheus, configuration, find_binary
from headrace.local.scaling import Scaling
from headrace.local.services import Endpoints, stop_groups
from headrace.monitoring import RULES
from headrace.records.layout import RunLayout
from tests import monitoring
from tests.support.cli_desk import Desk, wait_until

ENDS = Endpoints(
    run="r",
    redis_url="redis://:secret@127.0.0.1:1/0",
    external_redis=False,
    redis_password="secret",
    token="token",
    queue_port=2,
    coordinator_metrics_port=3,
    rollouter_ports={0: 4, 2: 5},
    trainer_port=6,
)


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "prometheus"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    monkeypatch.setenv(BINARY, str(file))
    return file


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    made.create()
    return made


def test_what_is_scraped_has_the_labels_of_a_cluster(binary: Path, layout: RunLayout) -> None:
    beside = LocalPrometheus(layout, "127.0.0.1", 0)
    beside.follow(ENDS)
    file = layout.prometheus / "targets.json"
    told = {t["labels"]["pod"]: t for t in json.loads(file.read_text())}
    assert {pod: t["targets"] for pod, t in told.items()} == {
        "trainer": ["127.0.0.1:6"],
        "coordinator": ["127.0.0.1:3"],
        "queue": ["127.0.0.1:2"],
        "rollouter-0": ["127.0.0.1:4"],
        "rollouter-2": ["127.0.0.1:5"],
    }
    labels = {"namespace": "local", "release": "r", "pod": "rollouter-2", "job": "rollouter"}
    assert told["rollouter-2"]["labels"] == labels
    assert "secret" not in file.read_text()
    assert "token" not in file.read_text()


def test_rollouters_that_come_and_go_are_followed(binary: Path, layout: RunLayout) -> None:
    beside = LocalPrometheus(layout, "127.0.0.1", 0)
    beside.follow(ENDS)
    file = layout.prometheus / "targets.json"
    written = file.stat().st_ino
    beside.follow(ENDS)
    assert file.stat().st_ino == written, "nothing has changed"
    beside.follow(ENDS.without_rollouter(0).with_rollouter(7))
    assert {t["labels"]["pod"] for t in json.loads(file.read_text())} >= {"rollouter-2", "rollouter-7"}
    assert "rollouter-0" not in file.read_text()


def test_it_is_not_essential_and_stops_last(binary: Path, layout: RunLayout) -> None:
    service = LocalPrometheus(layout, "127.0.0.1", 0).service()
    assert not service.essential
    assert "HEADRACE_TOKEN" not in service.env
    assert stop_groups(["prometheus", "trainer"])[-1] == ["prometheus"]


@monitoring.needs_promtool
def test_its_configuration_is_one(tmp_path: Path) -> None:
    found = configuration(tmp_path / "targets.json")
    assert found["rule_files"] == [str(RULES.resolve())]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(found))
    (tmp_path / "targets.json").write_text("[]")
    assert "SUCCESS" in monitoring.promtool("check", "config", file)


def test_without_the_program_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="apt-get install prometheus"):
        find_binary({"PATH": "/nowhere"})
    with pytest.raises(ConfigError, match=r"HEADRACE_PROMETHEUS=/nowhere/p is no program"):
        find_binary({"PATH": "/usr/bin", BINARY: "/nowhere/p"})


def test_a_port_that_is_taken_is_refused(binary: Path, layout: RunLayout) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another, or leave the port out"):
            LocalPrometheus(layout, "127.0.0.1", port)


def test_rules_that_are_missing_are_told(
    binary: Path, layout: RunLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prometheus, "RULES", tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        LocalPrometheus(layout, "127.0.0.1", 0)


def test_a_run_goes_on_without_it(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at once, each time: the run says so and goes on."""
    broken = tmp_path / "broken-prometheus"
    broken.write_text("#!/bin/sh\necho cannot read the data >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv(BINARY, str(broken))
    process = desk.start("run", "run.yaml", "--prometheus", standin="wait")
    desk.wait_for_training()
    log = desk.layout.log("prometheus")
    wait_until(lambda: log.exists() and log.read_text().count("cannot read") == 2, "it was restarted once")
    wait_until(lambda: "prometheus" not in desk.pids(), "it was given up")
    process.send_signal(2)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "the run goes on without it" in output
    assert "run.yaml --prometheus" in output  # the command that continues the run


def test_given_up_it_is_not_taken_for_a_rollouter(layout: RunLayout) -> None:
    names = [f"rollouter-{replica}" for replica in ENDS.rollouter_ports]
    left: list[str] = []
    supervisor = SimpleNamespace(
        children={name: SimpleNamespace(state=ProcessState.READY) for name in names},
        given_up=["prometheus"],
        retire=lambda name, grace_s: left.append(name),
    )
    config = SimpleNamespace(
        rollout=SimpleNamespace(replicas=2), services=SimpleNamespace(stop_timeout_s=1.0)
    )
    scaling = Scaling(config, layout, ENDS, supervisor, print)  # type: ignore[arg-type]
    scaling.tick()
    assert not left
    supervisor.given_up.append("rollouter-9")  # one that was added and cannot start
    scaling.tick()
    assert left == ["rollouter-2"]


def test_a_wrong_port_is_refused_before_anything_starts(desk: Desk) -> None:
    code, output = desk.headrace("run", "run.yaml", "--prometheus", "rollout.n=4")
    assert code == 2
    assert "put key=value before --prometheus" in output
    assert not (desk.directory / "runs").exists()


@monitoring.needs_prometheus
def test_a_real_one_serves_the_rules(desk: Desk) -> None:
    process = desk.start("run", "run.yaml", "--prometheus", standin="wait")
    desk.wait_for_training()
    address = next(line for line in process.stdout or () if line.startswith("Prometheus: ")).split()[1]
    server = monitoring.Asked(address)
    wait_until(server.answers, "it answers")
    groups = server.get("/api/v1/rules")["groups"]
    assert sum(len(group["rules"]) for group in groups) == len(monitoring.rules())
    wanted = {"trainer", "queue", "rollouter-0", "rollouter-1"}

    def found() -> bool:
        targets = server.get("/api/v1/targets", state="active")["activeTargets"]
        return {t["labels"]["pod"] for t in targets} >= wanted

    wait_until(found, "it has found the services")
    process.send_signal(2)
    process.communicate(timeout=60)
    assert process.returncode == 130
