"""The `headrace` command as people run it: a process of its own, real Valkey, stand-ins for the services.

The stand-ins are modules of the services' names on PYTHONPATH; they serve the readiness checks, put a few
samples into the real ledger, write the run's files, and do what HEADRACE_STANDIN says.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace.cli.main import parse
from headrace.ledger import SyncLedger, ops
from headrace.local.preflight import external_redis_problems
from headrace.local.valkey_server import ValkeyServer, start_valkey
from tests.support.cli_desk import DEADLINE_S, Desk, wait_until


def test_a_dry_run_checks_and_starts_nothing(desk: Desk) -> None:
    code, output = desk.headrace("run", "run.yaml", "--dry-run", "async_training.staleness_threshold=0.5")
    assert code == 0, output
    assert "mode: async_partial_rollout" in output
    assert "max_required: 12 " in output
    assert "samples per sync: 8 (S x R x M" in output
    assert "updates: 2 (syncs: 2)" in output
    assert "valkey, coordinator, queue, rollouter-0, rollouter-1, trainer" in output
    assert not (desk.directory / "runs").exists()


def test_a_dry_run_says_what_the_run_would_refuse(desk: Desk) -> None:
    dry = ("run", "run.yaml", "--dry-run")
    code, output = desk.headrace(*dry, "trainer.resume=elsewhere")
    assert (code, "elsewhere is no complete checkpoint of this run" in output) == (2, True), output
    code, output = desk.headrace(*dry, "data.train_files=hf://datasets/x")
    assert (code, "hf://datasets/x: is an address; download it" in output) == (2, True), output
    layout = desk.layout
    lock = layout.lock()
    code, output = desk.headrace(*dry)
    assert (code, "a run is in progress there; stop it" in output) == (2, True), output
    lock.release()
    layout.requested.write_text(desk.config.read_text())
    layout.summary.write_text('{"status": "completed"}')
    code, output = desk.headrace(*dry, "seed=7")
    assert (code, "seed: was 0 when the run was begun and is 7 now" in output) == (2, True), output
    code, output = desk.headrace(*dry, "seed=7", "trainer.resume=never")
    assert code == 0, output


def test_modes_tells_the_numbers_and_the_way_on(desk: Desk) -> None:
    code, output = desk.headrace("modes", "run.yaml", "async_training.staleness_threshold=1.5")
    assert code == 0, output
    for expected in (
        "mode: async_partial_rollout",
        "largest version gap: unbounded",
        "warning: ",
        "next mode: ",
    ):
        assert expected in output
    limit = ["async_training.staleness_threshold=0.5", "async_training.max_version_gap=3"]
    assert "largest version gap: 3\n" in desk.headrace("modes", "run.yaml", *limit)[1]
    code, output = desk.headrace("modes", "run.yaml", "mode=one_step_off", *limit)
    assert code == 2
    assert "leave the key out, or leave mode out" in output


def test_held_out_prompts_that_are_trained_on_are_counted(desk: Desk) -> None:
    seen = (desk.directory / "rows.jsonl").read_text()
    new = seen.replace('"prompt": "', '"prompt": "never seen ')
    (desk.directory / "both.jsonl").write_text(seen + new)
    code, output = desk.headrace("run", "run.yaml", "--dry-run", "data.val_files=[both.jsonl]")
    assert code == 0, output
    assert "1 of 2 held-out prompts are training prompts too" in output


def test_a_run_to_its_end_and_once_more(desk: Desk) -> None:
    code, output = desk.headrace("run", "run.yaml")
    assert code == 0, output
    for expected in (
        "held-out s: 0.500 (version 1) -> 1.000 (version 2), 9 prompts",
        "2 optimizer steps",
        "idle: trainer 38 %, rollouters 25 %",
        "syncs: 2, median 0.15 s; engines score like the trainer to 2.0e-06",
        "ledger balanced: 4 issued = 4 ready",
        f"model: {desk.layout.final}",
    ):
        assert expected in output
    summary = desk.summary()
    assert summary["status"] == "completed"
    assert summary["engine"] == {"name": "standin", "version": "1"}
    assert summary["optimizer_steps"] == 2
    assert summary["idle_ratio"] == {"trainer": 0.375, "rollouter": 0.25}
    assert summary["version_gap"] == {"0": 14, "1": 2}
    assert summary["ledger"]["issued_total"] == 4 == summary["ledger"]["ready"]
    assert summary["sync"]["count"] == 2
    assert summary["sync"]["max_s"] == 0.2
    assert summary["sync"]["bytes"] == 1000
    assert [row["reward"] for row in summary["eval"]] == [0.5, 1.0]
    assert desk.leftovers() == []

    endpoints = json.loads(desk.layout.endpoints.read_text())
    assert stat.S_IMODE(desk.layout.endpoints.stat().st_mode) == 0o600
    secrets = [endpoints["token"], endpoints["redis_url"].split(":")[2].split("@")[0]]
    public = [p for p in desk.layout.root.rglob("*") if p.is_file() and desk.layout.private not in p.parents]
    for path in [p for p in public if p.name != "valkey.conf"]:
        assert not any(secret.encode() in path.read_bytes() for secret in secrets), path

    code, output = desk.headrace("run", "run.yaml")
    assert code == 0
    assert "the run is complete; to train again, add trainer.resume=never" in output
    code, output = desk.headrace("status", "x")
    assert code == 0
    assert "run x: completed" in output
    code, output = desk.headrace("audit", "runs/x")
    assert code == 0, output
    assert "ledger balanced: 4 issued = 4 ready" in output

    code, output = desk.headrace("run", "run.yaml", "trainer.resume=never")
    assert code == 0, output
    assert f"the earlier run is now in {desk.layout.root}.1" in output
    assert desk.summary()["sync"]["count"] == 2
    assert (desk.directory / "runs" / "x.1" / "summary.json").exists()


def test_a_service_beyond_its_restarts_fails_the_run(desk: Desk) -> None:
    code, output = desk.headrace("run", "run.yaml", standin="wait rollouter-1-exits")
    assert code == 1
    assert "rollouter-1 exited with code 3 (2 times)" in output
    assert "    the engine is out of memory" in output
    assert f"the whole log: {desk.layout.log('rollouter-1')}" in output
    assert desk.summary()["status"] == "failed"
    assert desk.leftovers() == []


def test_ctrl_c_stops_in_order_and_the_same_command_goes_on(desk: Desk) -> None:
    process = desk.start("run", "run.yaml", "seed=3", standin="wait")
    desk.wait_for_training()
    code, output = desk.headrace("status", "x")
    assert code == 0
    assert "x: running" in output
    assert "0 in_flight" in output
    code, output = desk.headrace("audit", "x")
    assert code == 0
    assert "ledger balanced" in output
    code, output = desk.headrace("run", "run.yaml", "seed=3")
    assert code == 2
    assert f"in use by a run in progress (process {process.pid})" in output

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, output
    assert "stopping, the run can be resumed with: headrace run run.yaml seed=3" in output
    assert desk.summary()["status"] == "stopped"
    order = (desk.directory / "order").read_text().split()
    assert sorted(order[:3]) == ["rollouter-0", "rollouter-1", "trainer"], "who has something to save"
    assert order[3:] == ["coordinator", "queue"]

    code, output = desk.headrace("run", "run.yaml", "seed=4")
    assert code == 2
    assert "seed: was 3 when the run was begun and is 4 now" in output
    code, output = desk.headrace("run", "run.yaml", "seed=3")
    assert code == 0, output
    assert "continuing run x" in output
    assert desk.summary()["ledger"]["issued_total"] == 4


def test_a_second_ctrl_c_kills_at_once(desk: Desk) -> None:
    process = desk.start("run", "run.yaml", "services.stop_timeout_s=3600", standin="wait deaf")
    desk.wait_for_training()
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("stopping"):
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "killing everything" in output
    assert desk.summary()["status"] == "stopped"


def test_a_run_whose_ledger_is_gone_at_the_end_has_failed(desk: Desk) -> None:
    code, output = desk.headrace("run", "run.yaml", standin="flush")
    assert code == 1, output
    assert "ledger balanced" not in output
    summary = desk.summary()
    assert (summary["status"], summary["balanced"]) == ("failed", None)
    assert "went back: it no longer exists" in summary["reason"]


def test_nothing_survives_a_kill_of_the_runner_and_the_run_goes_on(desk: Desk) -> None:
    process = desk.start("run", "run.yaml", standin="wait")
    desk.wait_for_training()
    wait_until(lambda: len(desk.leftovers()) == 8, "six services and two engines' children")
    process.kill()
    code, output = desk.headrace("run", "run.yaml")  # waits for what is left of the killed one
    assert code == 0, output
    assert desk.summary()["ledger"]["issued_total"] == 4


def test_a_killed_run_is_told_from_a_live_one(desk: Desk) -> None:
    process = desk.start("run", "run.yaml", standin="wait")
    desk.wait_for_training()
    process.kill()
    wait_until(lambda: not desk.layout.in_use(), "the lock is free")
    assert desk.leftovers() == []
    code, output = desk.headrace("status", "x", "--json")
    assert code == 0
    assert json.loads(output)["state"] == "killed"


def test_a_killed_server_comes_back_with_the_ledger(desk: Desk) -> None:
    process = desk.start("run", "run.yaml", standin="wait")
    desk.wait_for_training()
    before = desk.pids()["valkey"]
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: desk.pids().get("valkey", before) != before, "a new server")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "ledger balanced: 4 issued = 4 ready" in output


def test_a_runner_without_room_on_the_disk_still_ends_in_order(desk: Desk) -> None:
    """RLIMIT_FSIZE stands for the full disk; the services have been started without it."""
    process = desk.start("run", "run.yaml", standin="wait")
    desk.wait_for_training()
    limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10, limits[1]))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert f"{desk.layout.summary} cannot be written: " in output
    assert "ledger balanced: 4 issued = 4 ready" in output
    assert desk.leftovers() == []
    code, output = desk.headrace("run", "run.yaml")  # there is room again
    assert code == 0, output


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path / "external", "secret-password") as running:
        yield running


@contextlib.contextmanager
def alive(server: ValkeyServer, run: str) -> Iterator[None]:
    """Somebody's service gives signs of life, as the real ones do."""
    over = threading.Event()

    def show() -> None:
        with redis.Redis.from_url(server.url) as client:
            ledger = SyncLedger(client, run)
            while not over.wait(0.1):
                ledger.run(ops.alive())

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_an_external_server_is_used_and_its_ledger_not_mixed_up(desk: Desk, server: ValkeyServer) -> None:
    code, output = desk.headrace("run", "run.yaml", f"redis.url={server.url}")
    assert code == 0, output
    assert "secret-password" not in output + desk.layout.config.read_text()
    assert "valkey" not in desk.pids()
    code, output = desk.headrace("audit", "x")
    assert (code, "4 issued = 4 ready" in output) == (0, True)

    with redis.Redis.from_url(server.url) as client:
        client.zadd("headrace:{x}:trained", {"0000000000": 1})
    code, output = desk.headrace("audit", "x")
    assert code == 1
    assert "LEDGER NOT BALANCED" in output
    assert "0000000000" in output

    desk.layout.move_aside()
    code, output = desk.headrace("run", "run.yaml", f"redis.url={server.url}")
    assert code == 2
    assert "holds the ledger of another run called 'x'" in output
    assert "choose another name with name=..." in output
    assert "resume=never" not in output, "it may be somebody's who is not here"
    anew = ("run", "run.yaml", f"redis.url={server.url}", "trainer.resume=never", "ledger.lease_s=0.5")
    with alive(server, "x"):
        code, output = desk.headrace(*anew)
        assert (code, "another run called 'x' is running there" in output) == (2, True), output
    code, output = desk.headrace(*anew)
    assert code == 0, output
    assert "deleted the earlier ledger of x" in output
    assert "secret-password" not in output


def test_a_wrong_password_is_told_and_not_shown(desk: Desk, server: ValkeyServer) -> None:
    url = server.url.replace("secret-password", "wrong-password")
    code, output = desk.headrace("run", "run.yaml", "--dry-run", f"redis.url={url}")
    assert code == 2
    assert "refuses this user or password" in output
    assert "wrong-password" not in output
    code, output = desk.headrace(
        "run", "run.yaml", "--dry-run", f"redis.url=redis://127.0.0.1:{server.port}/0"
    )
    assert code == 2
    assert "asks for a password" in output


def test_a_server_that_evicts_is_refused(server: ValkeyServer) -> None:
    assert list(external_redis_problems(server.url, 5.0)) == []
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    (problem,) = external_redis_problems(server.url, 5.0)
    assert "set it to noeviction" in problem
    assert "secret-password" not in problem


def test_a_server_that_keeps_nothing_is_refused_unless_accepted(server: ValkeyServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendonly", "no")
    (problem,) = external_redis_problems(server.url, 5.0)
    assert "redis.allow_volatile=true" in problem
    assert list(external_redis_problems(server.url, 5.0, allow_volatile=True)) == []


def test_every_problem_is_found_before_anything_starts(desk: Desk, server: ValkeyServer) -> None:
    (desk.directory / "bad.jsonl").write_text('{"prompt": "p", "data_source": "s"}\n')
    (desk.directory / "broken.py").write_text("import nothing_of_this_name\n")
    (desk.directory / "model" / "model.safetensors").unlink()
    (desk.directory / "model" / "generation_config.json").write_text('{"eos_token_id": []}')
    code, output = desk.headrace(
        "run",
        "run.yaml",
        "data.train_files=[bad.jsonl, none.jsonl]",
        "data.max_response_length=100",
        "custom_reward_function.path=broken.py",
        f"services.queue_port={server.port}",
        "redis.url=redis://127.0.0.1:1/0",
    )
    assert code == 2
    for expected in (
        "none.jsonl: no such file",
        "bad.jsonl:1: reward_model",
        "no *.safetensors weights",
        "generation_config.json: eos_token_id is []: make it the number",
        "= 116, but the model takes 64 positions",
        "nothing_of_this_name",
        f"services.queue_port: port {server.port} on 127.0.0.1: Address already in use",
        "no answer from 127.0.0.1:1",
    ):
        assert expected in output
    assert "Traceback" not in output
    assert not (desk.directory / "runs").exists()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def compute_score(a): return 0\n", "must accept"),
        ("def other(): pass\n", "has no function 'compute_score'"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("import os; os.abort()\n", "its import ended with SIGABRT"),
    ],
)
def test_a_reward_that_cannot_be_used(desk: Desk, source: str, told: str) -> None:
    (desk.directory / "reward.py").write_text(source)
    code, output = desk.headrace("run", "run.yaml", "--dry-run")
    assert code == 2
    assert told in output


def test_unknown_runs_are_told(desk: Desk) -> None:
    for command in ("status", "audit", "dead"):
        code, output = desk.headrace(command, "none")
        assert code == 2
        assert "no run 'none'" in output


def test_every_command_has_help(desk: Desk) -> None:
    for arguments in (["--help"], ["run", "--help"], ["status", "--help"], ["audit", "--help"]):
        code, output = desk.headrace(*arguments)
        assert code == 0
        assert "usage: headrace" in output


def test_overrides_may_stand_around_options() -> None:
    args = parse(["run", "a.yaml", "--dry-run", "x=1", "y=2"])
    assert (args.dry_run, args.overrides) == (True, ["x=1", "y=2"])
    args = parse(["run", "a.yaml", "x=1", "--dry-run", "y=2"])
    assert (args.dry_run, args.overrides) == (True, ["x=1", "y=2"])


@pytest.mark.parametrize("argv", [["run", "a.yaml", "--dryrun"], ["status", "x", "y=1"], ["run"], []])
def test_a_bad_command_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert "usage: headrace" in capsys.readouterr().err


def test_a_run_after_an_option_that_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["dead", "--requeue", "r1"], ["status", "--watch", "r1"]):
        with pytest.raises(SystemExit):
            parse(argv)
        assert f": headrace {argv[0]} RUN --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("validate", "--gpu-memory", "nan"),
        ("validate", "--gpu-memory", "inf"),
        ("validate", "--timeout", "-1"),
        ("validate", "--timeout", "soon"),
        ("samples", "--last", "abc"),
        ("samples", "--last", "0"),
    ],
)
def test_a_bad_number(command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([command, "x", f"{option}={value}"])
    assert caught.value.code == 2
    assert f"argument {option}: {value} is not possible; give " in capsys.readouterr().err
