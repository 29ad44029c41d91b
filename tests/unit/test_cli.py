"""The `headrace` command as people run it: a process of its own, real Valkey, stand-ins for the services.

The stand-ins are modules of the services' names on PYTHONPATH; they serve the readiness checks, put a few
samples into the real ledger, write the run's files, and do what HEADRACE_STANDIN says.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from headrace.cli.main import parse
from headrace.runner.guardian import MARK
from headrace.runner.layout import RunLayout
from headrace.runner.preflight import external_redis_problems
from headrace.valkey_server import ValkeyServer, start_valkey

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0

SERVE = """
import http.server, signal, sys, threading, time

def flag(name):
    return sys.argv[sys.argv.index(name) + 1]

def on_stop(code, say):
    open("up-" + say, "w")
    def stop(*_):
        with open("order", "a") as file:
            file.write(say + " ")
        import os
        os._exit(code)
    signal.signal(signal.SIGTERM, stop)

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()

def serve():
    http.server.HTTPServer(("127.0.0.1", int(flag("--port"))), Ready).serve_forever()
"""

STANDINS = {
    "standin_serve": SERVE,
    # headrace.rendezvous is real but for torch, which takes seconds to import
    "torch/__init__": "",
    "torch/distributed": """
import socket
class TCPStore:
    def __init__(self, host, port, **_):
        self.port = port
        self.socket = socket.create_server((host, port))
""",
    "headrace_coordinator": "from standin_serve import *; on_stop(0, 'coordinator'); serve()",
    "headrace_queue": """
from standin_serve import *
import os
from headrace.config_load import load
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.redis_connect import connect
from pathlib import Path
run = load(Path(flag("--config"))).name
ledger = SyncLedger(connect(os.environ["HEADRACE_REDIS_URL"], 5.0), run)
if ledger.run(ops.configure(8, 8, 1, 1, 4, "fingerprint")).created:
    ledger.run(ops.issue(0, [b"p"] * 4, True))
on_stop(0, "queue")
serve()
""",
    "headrace_rollouter": """
from standin_serve import *
import json, os, subprocess
replica = flag("--replica")
if "rollouter-%s-exits" % replica in os.environ["HEADRACE_STANDIN"]:
    print("the engine is out of memory")
    sys.exit(3)
json.dump({"name": "standin", "version": "1"}, open(os.environ["HEADRACE_RUN_DIR"] + "/engine.json", "w"))
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
on_stop(0, "rollouter-" + replica)
serve()
""",
    "headrace_trainer": """
from standin_serve import *
import json, os
root = os.environ["HEADRACE_RUN_DIR"]
on_stop(75, "trainer")
if "deaf" in os.environ["HEADRACE_STANDIN"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert os.environ["OMP_NUM_THREADS"] == "1" and os.environ["HEADRACE_TOKEN"]
while not all(os.path.exists("up-" + n) for n in ("coordinator", "queue", "rollouter-0", "rollouter-1")):
    time.sleep(0.01)
def append(name, row):
    with open(os.path.join(root, name), "a") as file:
        file.write(json.dumps(row) + "\\n")
for step in (1, 2):
    append("metrics.jsonl", {
        "step": step, "optimizer_steps": step, "reward/mean": 0.25 * step, "timing_s/step": 2.0,
        "timing_s/gen_wait": 0.5 * step, "rollouter/idle_ratio": 0.25, "trainer/idle_ratio": 0.25 * step,
        "staleness/version_gap/hist": {"0": 7, "1": 1}, "fully_async/count/current_param_version": step})
    append("sync.jsonl", {"version": step, "total_s": 0.1 * step, "pause_s": 0, "transfer_s": 0,
                          "commit_s": 0, "bytes": 1000, "logprob_max_abs_diff": 1e-6 * step})
    append("eval.jsonl", {"version": step, "data_source": "s", "reward": 0.5 * step, "n": 9, "unfinished": 0})
while "wait" in os.environ["HEADRACE_STANDIN"]:
    time.sleep(0.02)
os.makedirs(root + "/final", exist_ok=True)
""",
}


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


class Desk:
    """A directory with a model, data, a reward, a configuration and the stand-ins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[str]] = []
        for name, text in STANDINS.items():
            path = directory / "standins" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        model = directory / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
        (model / "tokenizer.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"")
        row = {"prompt": "p", "data_source": "s", "reward_model": {"ground_truth": "t"}}
        (directory / "rows.jsonl").write_text(json.dumps(row) + "\n")
        (directory / "reward.py").write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
        )
        self.config = directory / "run.yaml"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "name": "x",
                    "model": {"path": "model"},
                    "data": {
                        "train_files": ["rows.jsonl"],
                        "val_files": ["rows.jsonl"],
                        "max_prompt_length": 16,
                        "max_response_length": 16,
                    },
                    "rollout": {"total_rollout_steps": 16, "replicas": 2},
                    "actor": {"ppo_mini_batch_size": 8},
                    "custom_reward_function": {"path": "reward.py"},
                    "services": {"max_restarts": 1, "start_timeout_s": 60, "stop_timeout_s": 30},
                }
            )
        )

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.directory / "runs" / "x")

    def start(self, *arguments: str, standin: str = "") -> subprocess.Popen[str]:
        env = {**os.environ, "HEADRACE_STANDIN": standin}
        env["PYTHONPATH"] = os.pathsep.join([str(self.directory / "standins"), str(REPO)])
        env.pop(MARK, None)
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.main", *arguments],
            cwd=self.directory,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def headrace(self, *arguments: str, standin: str = "") -> tuple[int, str]:
        """Exit code and everything printed."""
        process = self.start(*arguments, standin=standin)
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output

    def summary(self) -> dict[str, Any]:
        summary = self.layout.read_summary()
        assert summary is not None
        return summary

    def wait_for_training(self) -> None:
        def trains() -> bool:
            return self.layout.endpoints.exists() and "rollouter-1" in self.pids() and self.rows() == 2

        wait_until(trains, "training")

    def rows(self) -> int:
        return len(self.layout.eval.read_text().splitlines()) if self.layout.eval.exists() else 0

    def pids(self) -> dict[str, int]:
        pids: dict[str, int] = json.loads(self.layout.endpoints.read_text())["pids"]
        return pids

    def leftovers(self) -> list[int]:
        """Processes of any run in this directory: every service has it in its environment."""
        found = []
        wanted = f"HEADRACE_RUN_DIR={self.layout.root}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                found += [int(entry.name)] if wanted in environment else []
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    wait_until(lambda: not made.leftovers(), "no process is left")


def test_a_dry_run_checks_and_starts_nothing(desk: Desk) -> None:
    code, output = desk.headrace("run", "run.yaml", "--dry-run", "async_training.staleness_threshold=0.5")
    assert code == 0, output
    assert "mode: async_partial_rollout" in output
    assert "max_required: 12 " in output
    assert "samples per sync: 8 (S x R x M" in output
    assert "updates: 2 (syncs: 2)" in output
    assert "valkey, rendezvous, coordinator, queue, rollouter-0, rollouter-1, trainer" in output
    assert not (desk.directory / "runs").exists()


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
    assert "the run is complete; to train anew, add trainer.resume=never" in output
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
    assert f"in use by a run that is on (process {process.pid})" in output

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, output
    assert "stopping, the run can be resumed with: headrace run run.yaml seed=3" in output
    assert desk.summary()["status"] == "stopped"
    order = (desk.directory / "order").read_text().split()
    assert order[0] == "trainer"
    assert sorted(order[1:3]) == ["rollouter-0", "rollouter-1"]
    assert order[3:] == ["queue", "coordinator"]

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


def test_nothing_survives_a_kill_of_the_runner_and_the_run_goes_on(desk: Desk) -> None:
    process = desk.start("run", "run.yaml", standin="wait")
    desk.wait_for_training()
    wait_until(lambda: len(desk.leftovers()) == 9, "seven services and two engines' children")
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path / "external", "secret-password") as running:
        yield running


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
    code, output = desk.headrace("run", "run.yaml", f"redis.url={server.url}", "trainer.resume=never")
    assert code == 0, output
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


def test_every_problem_is_found_before_anything_starts(desk: Desk, server: ValkeyServer) -> None:
    (desk.directory / "bad.jsonl").write_text('{"prompt": "p", "data_source": "s"}\n')
    (desk.directory / "broken.py").write_text("import nothing_of_this_name\n")
    (desk.directory / "model" / "model.safetensors").unlink()
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
        ("import os; os.abort()\n", "ended the process with code -6"),
    ],
)
def test_a_reward_that_cannot_be_used(desk: Desk, source: str, told: str) -> None:
    (desk.directory / "reward.py").write_text(source)
    code, output = desk.headrace("run", "run.yaml", "--dry-run")
    assert code == 2
    assert told in output


def test_unknown_runs_are_told(desk: Desk) -> None:
    for command in ("status", "audit"):
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
