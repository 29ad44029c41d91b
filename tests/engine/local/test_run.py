"""`headrace run` on real parts: Valkey, queue, coordinator, two vLLM engines, two FSDP2 ranks."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.local.scratch import PREFIX
from headrace.local.services import COORDINATOR_SOCKET, REDIS_SOCKET
from headrace.metrics.row_keys import CANARY, PEAK, SAVES, SYNC, TELEMETRY, TIMING_S_REWARD, problems
from headrace.reference.metrics import services
from tests import docs_commands, monitoring, no_compiler
from tests.listeners import (
    Listener,
    answers,
    command_of,
    listeners,
    open_unix_sockets,
    other_addresses,
    outward,
    tree_of,
    unix_sockets,
)
from tests.support.run_process import (
    ROOT,
    SAMPLES_PER_UPDATE,
    UPDATES,
    Run,
    make_run,
    processes_of,
    temporary_directory,
    wait_for,
)
from tests.traps import set_traps, sprung

ON_SOCKETS = {"valkey-server": REDIS_SOCKET, "headrace_coordinator": COORDINATOR_SOCKET}
READING = ("trainer.logger=[console,tensorboard]", "dump.samples_per_update=32")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    with temporary_directory() as folder:
        yield folder


@pytest.fixture(scope="module")
def working_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With modules of somebody's that have our names; the demo's files are those of other tests."""
    folder = set_traps(tmp_path_factory.mktemp("work"))
    (ROOT / ".cache").mkdir(exist_ok=True)
    (folder / ".cache").symlink_to(ROOT / ".cache")
    return folder


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, temporary: Path, working_directory: Path
) -> tuple[Run, str]:
    run = make_run(
        tmp_path_factory.mktemp("runs"),
        "finished",
        "trainer.peak_flops=1e11",
        "redis.max_memory_bytes=268435456",
        *READING,
    )
    # On a machine with Python and no compiler, as the README asks for.
    prometheus = ["prometheus"] if shutil.which("prometheus") else []
    machine = no_compiler.environment(tmp_path_factory.mktemp("machine") / "machine", prometheus)
    # Where Gloo and NCCL would listen if nobody told them otherwise.
    interface, _ = outward() or ("lo", "")
    machine |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    process = run.start(
        *(f"--{name}" for name in prometheus),
        env={**machine, "TMPDIR": str(temporary)},
        cwd=working_directory,
    )
    wait_for("an update", lambda: len(run.rows()) > 0, process, 300)
    (run.directory / "doors.json").write_text(json.dumps(look_at_doors(process.pid)))
    wait_for("half of the updates", lambda: len(run.rows()) >= UPDATES // 2, process, 300)
    wait_for(
        "every rollouter's second reading of itself", lambda: rollouters_have_measured(run), process, 120
    )
    (run.directory / "scraped.json").write_text(json.dumps(scrape(run)))
    assert any(temporary.glob("headrace-run-*/rollouter-0/*")), "vLLM's sockets lie elsewhere"
    (run.directory / "shown.json").write_text(json.dumps(secrets_shown(run, process.pid)))
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-6000:]
    return run, output


def test_no_process_of_a_run_imports_from_the_working_directory(
    finished: tuple[Run, str], working_directory: Path
) -> None:
    assert sprung(working_directory) == []


def look_at_doors(pid: int) -> dict[str, Any]:
    """Where a run's processes listen, and what answers on this machine's other addresses."""
    pids = tree_of(pid)
    there = listeners(pids)
    return {
        "listeners": [asdict(one) for one in sorted(there)],
        "reached": [(a, one.process) for one in there for a in other_addresses() if answers(a, one.port)],
        "open": sorted(open_unix_sockets(pids)),
        "unix": {part: sorted(unix_sockets(p for p in pids if part in command_of(p))) for part in ON_SOCKETS},
        # Everybody may see them: no secret may be in this file, as in no other.
        "commands": [command_of(one) for one in sorted(pids)],
    }


def test_nothing_listens_but_on_loopback(finished: tuple[Run, str]) -> None:
    run, _ = finished
    doors = json.loads((run.directory / "doors.json").read_text())
    there = [Listener(**one) for one in doors["listeners"]]
    assert not [one for one in there if not one.on_loopback or one.kind != "tcp"]
    assert doors["reached"] == []
    assert doors["open"] == []
    for part in (
        "headrace_coordinator",
        "headrace_queue",
        "headrace_rollouter",
        "VLLM::EngineCore",
        "headrace_trainer.launch.node_agent",
        "headrace_trainer.worker",
    ):
        assert any(part in one.process for one in there), f"{part} has not been looked at"


def test_what_is_sent_a_secret_listens_where_others_cannot(finished: tuple[Run, str]) -> None:
    """No port that another user could take, but for the coordinator's metrics, which are sent none."""
    run, _ = finished
    doors = json.loads((run.directory / "doors.json").read_text())
    for part, name in ON_SOCKETS.items():
        (path,) = doors["unix"][part]
        assert re.fullmatch(rf".*/{PREFIX}\w+/{name}", path)
    metrics = int(run.endpoints["metrics"]["coordinator"].split(":")[2].split("/")[0])
    ports = [one["port"] for one in doors["listeners"] if any(part in one["process"] for part in ON_SOCKETS)]
    assert ports == [metrics]


def rollouters_have_measured(run: Run) -> bool:
    """Their idle ratios are shown from then on. One of them may still be loading its engine."""
    try:
        shown = scrape(run)
    except OSError:
        return False
    return all(
        "headrace_rollouter_idle_ratio" in names
        for name, names in shown.items()
        if name.startswith("rollouter")
    )


def scrape(run: Run) -> dict[str, list[str]]:
    """Names of the metrics that each service shows to Prometheus now; the whole text goes to SERVICE.prom."""
    ends = json.loads((run.directory / "private" / "endpoints.json").read_text())
    found = {}
    for service, url in ends["metrics"].items():
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
            (run.directory / f"{service}.prom").write_text(text)
            families = text_string_to_metric_families(text)
            names = [f.name + ("_total" if f.type == "counter" else "") for f in families]
            found[service.removesuffix("-0")] = [*names]
    return found


def secrets_shown(run: Run, runner: int) -> dict[str, list[str]]:
    """Of every process of the run by its command: the secrets that its environment or its arguments show."""
    url, token = run.endpoints["redis_url"], run.endpoints["token"]
    secrets = {"password": url.split(":")[2].split("@")[0], "token": token}
    found = {}
    for process in [psutil.Process(runner), *psutil.Process(runner).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            for name in ("environ", "cmdline"):
                text = Path(f"/proc/{process.pid}/{name}").read_text(errors="replace")
                shown = [what for what, value in secrets.items() if value in text]
                found[f"{process.pid} {' '.join(words)[:200]} {name}"] = shown
    return found


def test_no_process_shows_a_secret(finished: tuple[Run, str]) -> None:
    """A reward's process is one of them, and the others are above it or beside it."""
    run, _ = finished
    shown: dict[str, list[str]] = json.loads((run.directory / "shown.json").read_text())
    for part in ("headrace_rollouter", "headrace_trainer", "headrace_queue", "headrace.rewards.keeper"):
        assert any(part in process for process in shown), part
    assert {process: what for process, what in shown.items() if what} == {}


def test_every_metric_is_documented_and_shown(finished: tuple[Run, str]) -> None:
    run, _ = finished
    keys = {key for row in run.rows() for key in row}
    met = {SYNC, CANARY, TELEMETRY, SAVES, PEAK, "in the last row of a window"}
    assert problems(keys, met) == []
    assert all(0.0 < row["perf/mfu"] < 1.0 for row in run.rows())
    scraped = json.loads((run.directory / "scraped.json").read_text())
    for service, names in services().items():
        shown = {n for n in scraped[service] if n.startswith("headrace_")}
        assert shown == set(names), service
    assert any(n.startswith("vllm:") for n in scraped["rollouter"])


@monitoring.needs_promtool
def test_promtool_has_nothing_to_say_about_what_is_shown(finished: tuple[Run, str]) -> None:
    run, _ = finished
    shown = sorted(run.directory.glob("*.prom"))
    assert len(shown) == 5
    for file in shown:
        # vLLM's names have colons, by its own convention: they are not ours to judge.
        ours = [line for line in file.read_text().splitlines(keepends=True) if "vllm:" not in line]
        monitoring.promtool("check", "metrics", text="".join(ours))


def test_no_label_grows_with_the_run(finished: tuple[Run, str]) -> None:
    """Steps, versions and samples are values, never labels: those would be a new series each."""
    run, _ = finished
    series: dict[str, int] = {}
    for file in run.directory.glob("*.prom"):
        for family in text_string_to_metric_families(file.read_text()):
            if family.name.startswith("headrace_"):
                labels = {label for sample in family.samples for label in sample.labels} - {"le"}
                assert labels <= monitoring.LABELS[family.name], family.name
                series[f"{file.stem}: {family.name}"] = len(family.samples)
    assert max(series.values()) < 200, series


@pytest.fixture(scope="module")
def asked(
    finished: tuple[Run, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], bool]]:
    """Whether an expression had data at any time of the run."""
    run, _ = finished
    file = run.directory / "config.yaml"
    began, ended = file.stat().st_mtime, (run.directory / "summary.json").stat().st_mtime
    with monitoring.prometheus_over(
        run.directory / "prometheus" / "data", tmp_path_factory.mktemp("asked")
    ) as server:
        yield lambda expression: server.has_data(expression, began, ended)


@monitoring.needs_prometheus
def test_every_panel_has_data(asked: Callable[[str], bool]) -> None:
    empty = [
        (panel, expression)
        for panel, expression in monitoring.panel_expressions()
        if not monitoring.names(expression) & monitoring.NEEDS_GPU
        and not asked(monitoring.filled_in(expression))
    ]
    assert not empty


@monitoring.needs_prometheus
def test_every_rule_has_data(asked: Callable[[str], bool]) -> None:
    """A recording rule has recorded; whatever an alert reads is there, at 0 if nothing is wrong."""
    for rule in monitoring.rules():
        if "record" in rule:
            assert asked(rule["record"]), rule["record"]
        else:
            for selector in monitoring.selectors(rule["expr"]):
                assert asked(selector), (rule["alert"], selector)


@monitoring.needs_prometheus
def test_no_alert_fires_in_a_run_that_is_well(asked: Callable[[str], bool]) -> None:
    assert asked("up")
    assert not asked('ALERTS{alertstate="firing"}')


def test_summary_tells_what_happened(finished: tuple[Run, str]) -> None:
    run, output = finished
    s = run.summary
    total = UPDATES * SAMPLES_PER_UPDATE
    assert s["status"] == "completed"
    assert s["engine"]["name"] == "vllm"
    assert s["engine"]["version"]
    assert s["policy_version"] == UPDATES // 2
    assert s["optimizer_steps"] == UPDATES
    assert s["trained_samples"] == total
    assert s["trained_trajectories"] == total * 8
    assert s["trained_tokens"] > 0
    assert [e["version"] for e in s["eval"]] == [0, 2, 4]
    assert all(e["n"] == 200 and 0 <= e["reward"] <= 1 for e in s["eval"])
    assert [e["version"] for e in run.rows("eval.jsonl")] == [0, 2, 4], "each validation is reported once"
    assert s["ledger"]["issued_total"] == s["ledger"]["trained"] == total
    assert s["ledger"]["dead"] == s["ledger"]["dropped"] == 0
    assert sum(s["version_gap"].values()) == total
    assert s["sync"]["count"] == UPDATES // 2 + 1
    assert 0 <= s["sync"]["logprob_max_abs_diff"] <= 1e-4
    assert 0 <= s["idle_ratio"]["trainer"] <= 1
    assert 0 <= s["idle_ratio"]["rollouter"] <= 1
    assert "ledger balanced" in output


def test_one_row_per_update_and_phases_add_up(finished: tuple[Run, str]) -> None:
    rows = finished[0].rows()
    assert [r["step"] for r in rows] == list(range(1, UPDATES + 1))
    for row in rows:
        ns = {k: round(v * 1e9) for k, v in row.items() if k.startswith("timing_s/") and k != TIMING_S_REWARD}
        assert sum(ns.values()) == 2 * ns["timing_s/step"], "phases add up to the nanosecond"
        assert row["actor/skipped_steps"] == 0
        assert 0.5 < row["rollout_corr/ess"] <= 1.0
    # The first update of a window is on-policy up to rounding: engine and trainer agree token by token.
    assert rows[0]["rollout_corr/ess"] > 0.999
    assert abs(rows[0]["actor/ppo_kl"]) < 1e-3


def test_the_commands_of_the_docs_read_it(finished: tuple[Run, str], tmp_path: Path) -> None:
    """Each command that README and docs show for a finished run, with this run in place of theirs."""
    run, _ = finished
    said = {}
    for command, *options in docs_commands.about_a_finished_run():
        if "--out" in options:
            at = options.index("--out") + 1
            options[at] = str(tmp_path / Path(options[at]).name)
        done = run.command(command, str(run.directory), *options)
        assert done.returncode == 0, (command, options, done.stdout + done.stderr)
        said[command] = done.stdout
    assert {"audit", "status", "samples", "report"} <= set(said)
    assert "completed" in said["status"]


def test_samples_trackers_and_the_page_have_every_update(finished: tuple[Run, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = finished
    told = run.command("samples", str(run.directory), "--last", "100000", "--json")
    assert told.returncode == 0, told.stderr
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    trained = [i for row in run.rows("trained.jsonl") for i in row.get("ids", [])]
    assert {row["sample_id"] for row in rows} == set(trained)
    assert len(rows) == len(trained) * 8
    assert all(row["response"].endswith("<eos>") for row in rows if row["finish"] == "stop")
    assert all(len(row["prompt"]) > 5 for row in rows)
    points = EventAccumulator(str(run.directory / "tensorboard"))
    points.Reload()
    means = [(e.step, e.value) for e in points.Scalars("reward/mean")]
    assert means == [(r["step"], pytest.approx(r["reward/mean"])) for r in run.rows()]
    assert [e.value for e in points.Scalars("val/spell_backward/version")] == [0, 2, 4]
    page = run.directory / "page.html"
    assert run.command("report", str(run.directory), "--out", str(page)).returncode == 0
    assert "Held-out score: spell_backward" in page.read_text()


def test_final_model_loads_and_has_moved(finished: tuple[Run, str]) -> None:
    import torch
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = finished
    start = yaml.safe_load((run.directory / "config.yaml").read_text())["model"]["path"]
    final = AutoModelForCausalLM.from_pretrained(run.directory / "final")
    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    assert AutoTokenizer.from_pretrained(run.directory / "final").encode("ab")
    moved = [name for name, p in final.state_dict().items() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)


def test_nothing_is_left_in_the_temporary_directory(finished: tuple[Run, str], temporary: Path) -> None:
    assert list(temporary.iterdir()) == []


def test_no_secret_in_logs_and_nothing_left_running(finished: tuple[Run, str]) -> None:
    run, output = finished
    secrets = []
    for file in (run.directory / "private").glob("*.json"):
        assert file.stat().st_mode & 0o077 == 0
        ends = json.loads(file.read_text())
        secrets += [v for k, v in ends.items() if "password" in k or k == "token"]
        secrets += [ends["redis_url"].split("@")[0].rsplit(":", 1)[-1]] if "redis_url" in ends else []
    assert secrets
    texts = [output] + [f.read_text(errors="replace") for f in (run.directory / "logs").glob("*")]
    texts += [f.read_text() for f in run.directory.glob("*.json*")] + [
        (run.directory / "config.yaml").read_text()
    ]
    for secret in secrets:
        assert not any(secret in text for text in texts)
    assert not processes_of(run.directory)
