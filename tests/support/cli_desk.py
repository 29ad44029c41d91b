"""A directory with a configuration, and stand-ins of the services for `headrace` to start."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from headrace.records.layout import RunLayout
from headrace.service.guardian import MARK
from tests.waiting import until

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
    "headrace_coordinator": """
from standin_serve import *
import os, socket
on_stop(0, "coordinator")
path = flag("--socket")
if os.path.exists(path):  # left behind by one that was killed
    os.unlink(path)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
while True:
    listener.accept()[0].close()
""",
    "headrace_queue": """
from standin_serve import *
import os
from headrace.connections import variables
from headrace.config.loading import load
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.ledger.record import LedgerRecord
from headrace.connections.redis_client import connect
from pathlib import Path
run = load(Path(flag("--config"))).name
seen = LedgerRecord(variables.run_dir_if_set()).marks
ledger = SyncLedger(connect(variables.redis_url(), 5.0), run, seen=seen)
if ledger.run(ops.configure(8, 8, 1, 1, 4, "fingerprint")).created:
    ledger.run(ops.issue(0, [b"p"] * 4, True))
    term = ledger.run(ops.open_term()).term
    ledger.run(ops.open_lineage(0))
    ledger.run(ops.finish_adopt(1))
    for version in (0, 1):
        ledger.run(ops.hold(term, version + 1, 1))
        ledger.run(ops.commit(term, version + 1, 1, version, "digest", [], False))
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
assert os.environ["OMP_NUM_THREADS"] == "1" and open(os.environ["HEADRACE_TOKEN_FILE"]).read()
while not all(os.path.exists("up-" + n) for n in ("coordinator", "queue", "rollouter-0", "rollouter-1")):
    time.sleep(0.01)
from headrace.connections import variables
from headrace.ledger import LedgerError, SyncLedger, ops
from headrace.connections.redis_client import connect
client = connect(variables.redis_url())
def committed():
    try:
        return SyncLedger(client, os.path.basename(root)).run(ops.stats()).version
    except LedgerError:
        return -1  # not begun yet
while committed() < 1:
    time.sleep(0.02)
def append(name, row):
    with open(os.path.join(root, name), "a") as file:
        file.write(json.dumps(row) + "\\n")
begun = os.path.exists(root + "/trained.jsonl")
if not begun:
    append("trained.jsonl", {"lineage": 1, "from_step": 0, "version": -1, "rows": 0})
for step in () if begun else (1, 2):
    append("metrics.jsonl", {
        "step": step, "optimizer_steps": step, "reward/mean": 0.25 * step, "timing_s/step": 2.0,
        "timing_s/gen_wait": 0.5 * step, "rollouter/idle_ratio": 0.25, "trainer/idle_ratio": 0.25 * step,
        "staleness/version_gap/hist": {"0": 7, "1": 1}, "fully_async/count/current_param_version": step})
    append("sync.jsonl", {"version": step - 1, "total_s": 0.1 * step, "pause_s": 0, "transfer_s": 0,
                          "commit_s": 0, "bytes": 1000, "logprob_max_abs_diff": 1e-6 * step})
    append("eval.jsonl", {"version": step, "data_source": "s", "reward": 0.5 * step, "n": 9, "unfinished": 0})
while "wait" in os.environ["HEADRACE_STANDIN"]:
    time.sleep(0.02)
if "flush" in os.environ["HEADRACE_STANDIN"]:
    calls = lambda: client.info("commandstats")["cmdstat_evalsha"]["calls"]
    before = calls()
    while calls() == before:  # the runner alone still asks
        time.sleep(0.05)
    client.flushall()
os.makedirs(root + "/final", exist_ok=True)
""",
}


wait_until = functools.partial(until, timeout_s=DEADLINE_S)


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
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "eos_token_id": 0}))
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
