"""The demo, started as the manifests say: every command, variable and file of theirs, but no cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import loading
from headrace.config.redis_url import with_password
from headrace.connections import reachable
from headrace.connections.net import free_port, is_loopback
from headrace.connections.redis_client import connect
from headrace.ledger.audit import audit
from headrace.local import valkey_server
from headrace.records.layout import leave_config
from scripts.kube_tools import ROOT, run_helm
from tests.deploy.cluster.judge import Reading, must_be_whole
from tests.deploy.cluster.site import Site
from tests.deploy.helm import charts
from tests.deploy.helm.local_pods import LocalPods
from tests.deploy.helm.objects import read
from tests.listeners import outward
from tests.waiting import until

PARTS = ("redis", "coordinator", "queue", "rollouter", "trainer")

PROBES = {
    "trainer": ("startupProbe", "livenessProbe"),
    **dict.fromkeys(PARTS[1:4], ("startupProbe", "livenessProbe", "readinessProbe")),
}


def manifests(folder: Path) -> str:
    """The demo's, with ports that are free here: they all come from one place."""
    chart = folder / "chart"
    shutil.copytree(charts.CHART, chart)
    flows = yaml.safe_load((chart / "flows.yaml").read_text())
    flows["ports"] = {who: dict.fromkeys(names) for who, names in flows["ports"].items()}
    for names in flows["ports"].values():
        names.update({name: free_port() for name in names})
    (chart / "flows.yaml").write_text(yaml.safe_dump(flows))
    return run_helm(
        "template", "demo", str(chart), "--values", str(chart / "ci" / "demo-cpu.yaml"),
        "--set-json", "config.rollout.total_rollout_steps=96",
        "--set-json", "config.rollout.test_freq=0",
        "--set-json", "config.trainer.n_gpus_per_node=1",
        "--set-json", "config.trace.enable=true",
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalPods]:
    volumes = {
        "/demo": ROOT / ".cache" / "demo",  # kept for the next test that takes the demo
        "/runs": tmp_path / "runs",
        "/data": tmp_path / "data",
    }
    for path in volumes.values():
        path.mkdir(parents=True, exist_ok=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(valkey_server.server_binary(tmp_path))
    # Not loopback, where there is another: so what a pod keeps to itself can be told from its doors.
    _, address = outward() or ("lo", "127.0.0.1")
    made = LocalPods(read(manifests(tmp_path)), tmp_path, volumes, address)
    yield made
    made.close()


def test_the_services_find_each_other(
    run: LocalPods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but those that compute, then what `helm test` starts, and what it says when something is wrong."""
    for part in PARTS[:3]:
        run.start(part)
    run.start("test")
    assert run.running.pop("test").wait(90) == 0, run.log("test")
    assert run.log("test").count("ok  ") == 3
    assert run.log("test").count("refuses who has no") == 2
    assert run.ended() == {}
    assert_is_found(run, tmp_path)
    assert_tells_what_is_wrong(run, monkeypatch, capsys)
    for name in ("queue", "coordinator", "redis"):
        assert run.stop(name) == 0, run.log(name)[-4000:]
    code, text = ask(run, monkeypatch, capsys)
    assert code == 1
    assert text.count("failed  ") == 3
    assert "queue: no answer from" in text


def assert_is_found(run: LocalPods, folder: Path) -> None:
    """With what the trainer leaves at its start."""
    mounted = folder / "config" / "config.yaml"
    leave_config(loading.load(mounted), mounted, folder / "runs" / "demo")
    code, said = run.execute("trainer", "headrace", "status", "/runs/demo")
    assert code == 0, said
    assert said.startswith("demo: running in ")
    assert "0 trained" in said
    code, said = run.execute("trainer", "headrace", "audit", "/runs/demo")
    assert code == 0, said


def assert_tells_what_is_wrong(
    run: LocalPods, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = ask(run, monkeypatch, capsys, HEADRACE_TOKEN="wrong")
    assert (code, text.count("ok  ")) == (1, 2)
    assert "failed  coordinator: " in text
    assert "refuses our token: UNAUTHENTICATED" in text
    code, text = ask(run, monkeypatch, capsys, HEADRACE_REDIS_PASSWORD="not-the-word")
    assert (code, text.count("ok  ")) == (1, 2)
    assert "failed  redis: Redis at " in text
    assert "refuses the login" in text
    assert "not-the-word" not in text


def assert_can_be_read(run: LocalPods, folder: Path) -> None:
    """In the trainer's pod, with the commands that docs/kubernetes.md shows."""

    def headrace(*words: str) -> str:
        code, said = run.execute("trainer", "headrace", *words)
        assert code == 0, said
        return said

    assert "demo: completed in " in headrace("status", "/runs/demo")
    site = Local(run)
    facts = site.status()
    assert (facts["state"], facts["last_update"]["step"]) == ("completed", 6)
    assert facts["last_update"]["actor/lr"] == 5e-4
    audited = site.audit()
    assert (audited["balanced"], audited["steps"]) == (True, 6)
    now = Reading.of(site.stats())
    assert not now.on
    must_be_whole(audited, now)
    assert site.generated("demo-rollouter") >= 96
    assert "── sample " in headrace("samples", "/runs/demo", "--worst", "1")
    headrace("dead", "/runs/demo")
    headrace("report", "/runs/demo", "--out", "/tmp/report.html")
    assert "completed" in (folder / "tmp" / "report.html").read_text()
    said = headrace("trace", "/runs/demo", "--out", "-")
    merged, end = json.JSONDecoder().raw_decode(said)  # what follows went to standard error
    assert_has_time(merged["traceEvents"])
    assert "of 3 processes over " in said[end:]
    assert ", their clocks aligned to " in said[end:]
    assert (
        run.secret("trainer", "HEADRACE_REDIS_PASSWORD_FILE")
        not in (folder / "runs" / "demo" / "config.yaml").read_text()
    )


class Local(Site):
    """What `make test-cluster` asks pods, asked these."""

    def __init__(self, run: LocalPods) -> None:
        super().__init__("here", "demo", [], {})
        self._run = run

    def _exec(self, where: str, *words: str) -> str:
        component = where.rpartition("-")[2]
        code, said = self._run.execute(component, *words)
        assert code == 0, said
        return said

    def _port(self, component: str, name: str) -> int:
        return self._run.port(component, name)


def assert_has_time(events: Sequence[dict[str, Any]]) -> None:
    """Of every pod that records, also of those that do not see the run's directory."""
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    seen = {(rows[e["pid"]], e["name"]) for e in events if e["ph"] == "X"}
    assert {
        ("trainer-0", "update_actor"),
        ("rollouter-rollouter-0", "sample"),
        ("coordinator", "round"),
    } <= seen


def assert_listens_as_the_flows_say(run: LocalPods) -> int:
    """Every port that others reach is one to which the table lets somebody connect. Returns their number."""
    flows = yaml.safe_load((charts.CHART / "flows.yaml").read_text())["flows"]
    opened = yaml.safe_load((charts.CHART / "values.yaml").read_text())["networkPolicy"]["ephemeralPorts"]
    seen: set[tuple[str, str]] = set()
    for part, (there, open_sockets) in run.doors().items():
        assert not open_sockets, part
        listed = {flow["port"] for flow in flows if flow["to"] == part}
        names = run.ports(part)
        for one in there:
            if one.on_loopback and not is_loopback(run.address):
                continue  # for this pod alone
            port = names.get(one.port, "ephemeral")
            assert port in listed, one
            assert one.kind == "tcp", one
            if port == "ephemeral":
                assert one.address.removeprefix("::ffff:") == run.address, one
                assert opened["from"] <= one.port <= opened["to"], one
            seen.add((part, port))
    assert seen == {
        *(("redis", "redis"), ("coordinator", "grpc"), ("coordinator", "metrics"), ("queue", "http")),
        *(("rollouter", "http"), ("rollouter", "ephemeral")),
        *(("trainer", "metrics"), ("trainer", "ephemeral")),
    }
    return len(seen)


def ask(
    run: LocalPods, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **changes: str
) -> tuple[object, str]:
    """The test's pod in this process, with some variables changed: exit code and output."""
    capsys.readouterr()
    with monkeypatch.context() as patch:
        for name, value in (run.variables("test") | changes).items():
            if name.startswith("HEADRACE_"):
                patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            reachable.main([*run.options("test"), "--timeout-s", "0"])
    return ended.value.code, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_to_its_end(run: LocalPods, tmp_path: Path) -> None:
    for part in PARTS:
        run.start(part)

    heartbeats: set[str] = set()
    looked: list[int] = []
    metrics = tmp_path / "runs" / "demo" / "metrics.jsonl"

    def completed() -> bool:
        heartbeats.update(file.name for file in (tmp_path / "scratch" / "heartbeat").glob("*"))
        assert run.ended() == {}, {name: run.log(name)[-4000:] for name in run.ended()}
        if not looked and metrics.exists() and "\n" in metrics.read_text():
            looked.append(assert_listens_as_the_flows_say(run))
        return "completed; waiting to be stopped" in run.log("trainer")

    until(completed, f"the run to be complete; logs: {tmp_path}", timeout_s=400)
    assert heartbeats == {"launcher", "rank-0"}
    assert looked
    for part, kinds in PROBES.items():
        assert [run.probe(part, kind) for kind in kinds] == [""] * len(kinds), part
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(rows) == 6
    assert (tmp_path / "runs" / "demo" / "final" / "config.json").exists()
    told = run.variables("trainer")
    password = run.secret("trainer", "HEADRACE_REDIS_PASSWORD_FILE")
    with connect(with_password(told["HEADRACE_REDIS_URL"], password)) as client:
        assert audit(client, "demo").balanced
    assert_can_be_read(run, tmp_path)
    for name in ("trainer", "rollouter", "queue", "coordinator"):
        assert run.stop(name) == 0, run.log(name)[-4000:]
    assert not [name for name in run.running if password in run.log(name)]
