"""A trainer of two nodes, as two pods start it: one is lost, replaced, and the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from headrace.connections.net import free_port
from headrace.records.checkpoints import complete_checkpoints
from headrace.service.guardian import MARK, kill_marked, marked
from tests.deploy.helm import charts
from tests.deploy.helm.objects import pods
from tests.support.run_process import ROOT, SAMPLES_PER_UPDATE, Run, make_run, wait_for
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPDATES = 20
LIMIT_S = 180.0
FIRST, SECOND = "127.0.0.2", "127.0.0.3"
OTHER_NODE = f"other-node-{os.getpid()}"


def command_of_a_pod(run: Run, number: int, scratch: Path) -> list[str]:
    """What the chart has the container of a trainer pod run, with this machine's files and a free port."""
    two_nodes = (
        "config.trainer.nnodes=2",
        "config.trainer.n_gpus_per_node=1",
        'checkpoints.accessModes=["ReadWriteMany"]',
    )
    (pod,) = [
        p for p in pods(charts.rendered("ci/demo-cpu.yaml", sets=two_nodes)) if p.component == "trainer"
    ]
    (container,) = pod.spec["containers"]
    here = {
        "/etc/headrace/config/config.yaml": str(run.directory / "config.yaml"),
        "/scratch": str(scratch),
        "$(POD_IP)": SECOND,
        "$(POD_NAME)": f"trainer-{number}",
    }
    words = [*container["command"], *container["args"]]
    for there, path in here.items():
        assert any(there in word for word in words), (there, words)
        words = [word.replace(there, path) for word in words]
    program = str(Path(sys.executable).parent / words[0])
    return [program, *(f"--port={free_port()}" if w.startswith("--port=") else w for w in words[1:])]


def start_node(run: Run, number: int, log: Path) -> subprocess.Popen[bytes]:
    """The other node's pod."""
    ends = run.endpoints
    env = {
        **os.environ,
        "HEADRACE_REDIS_URL": ends["redis_url"],
        "HEADRACE_COORDINATOR": ends["coordinator"],
        "HEADRACE_RUN_DIR": str(run.directory),
        "HEADRACE_TOKEN": ends["token"],
        "OMP_NUM_THREADS": "1",
        MARK: f"{OTHER_NODE}/{number}",
    }
    with log.open("ab") as output:
        return subprocess.Popen(
            command_of_a_pod(run, number, log.parent / f"scratch-{number}"),
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def change_the_rule(run: Run, process: subprocess.Popen[str]) -> None:
    """eta and S while the run is on: two updates to a window from then on, and another gate."""
    tune = ("tune", str(run.directory), "async_training.staleness_threshold=0.25")
    refused = run.command(*tune, "rollout.n=4")
    assert (refused.returncode, "rollout.n" in refused.stderr) == (2, True), refused
    assert run.stats().max_required == 24
    done = run.command(*tune, "async_training.trigger_parameter_sync_step=2")
    assert done.returncode == 0, done.stderr
    wait_for("the gate", lambda: run.stats().max_required == 40, process, LIMIT_S)
    assert "recommended rollouters: " in run.command("status", str(run.directory)).stdout
    rows = len(run.rows())
    wait_for("a window of two updates", lambda: len(run.rows()) >= rows + 3, process, LIMIT_S)
    versions = [row["fully_async/count/current_param_version"] for row in run.rows()]
    print("version of each update:", versions)
    assert any(a == b for a, b in pairwise(versions[rows - 1 :])), versions


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    kill_marked(OTHER_NODE)


def addresses(pids: list[int]) -> set[str]:
    """Of the agents among these processes: what they say where they are."""
    words = [word for pid in pids for word in psutil.Process(pid).cmdline()]
    return {word.partition("=")[2] for word in words if word.startswith("--local-addr=")}


def test_a_node_is_lost_and_replaced(tmp_path: Path, nothing_left: None) -> None:
    run = make_run(
        tmp_path,
        "nodes",
        f"rollout.total_rollout_steps={UPDATES * SAMPLES_PER_UPDATE}",
        "rollout.replicas=1",
        "rollout.test_freq=0",
        "async_training.trigger_parameter_sync_step=1",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
    )
    process = run.start(env={"HEADRACE_NODE_ADDRESS": FIRST})
    wait_for("the launcher", lambda: "waiting for nodes" in run.log("trainer"), process, LIMIT_S)
    launcher = run.pid("trainer")
    other = start_node(run, 1, tmp_path / "other.log")
    wait_for("a checkpoint", lambda: complete_checkpoints(run.directory / "checkpoints"), process, LIMIT_S)
    change_the_rule(run, process)
    there = marked(OTHER_NODE)
    assert addresses(there) == {SECOND}, "torchrun is not where it was told to be"
    assert len(there) >= 3

    assert kill_marked(OTHER_NODE)  # as when a machine is lost: launcher, torchrun and rank at once, kill -9
    other.wait(10)
    wait_for("the end of the launch", lambda: run.log("trainer").count("waiting for nodes") == 2, process, 60)
    assert (run.pid("trainer"), run.rows() != []) == (launcher, True), "who was not lost does not exit"
    replacement = start_node(run, 2, tmp_path / "other.log")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output[-4000:] + run.log("trainer")[-4000:]
    until(lambda: "completed; waiting" in (tmp_path / "other.log").read_text(), "the other node's end", 30)
    assert replacement.poll() is None, "a Deployment would start it again"
    replacement.terminate()
    assert replacement.wait(30) == 0, (tmp_path / "other.log").read_text()[-4000:]

    assert "restart" not in output, "no service had to be started again"
    summary = run.summary
    assert summary["balanced"]
    starts = [row["from_step"] for row in run.rows("trained.jsonl") if "from_step" in row]
    assert len(starts) == 2
    assert starts[0] == 0 < starts[1], "the second launch goes on from a checkpoint"
    assert summary["ledger"]["trained"] == summary["ledger"]["issued_total"] == UPDATES * SAMPLES_PER_UPDATE
    audited = run.command("audit", str(run.directory))
    assert audited.returncode == 0, audited.stdout
    assert f"{UPDATES * SAMPLES_PER_UPDATE} samples trained once each" in audited.stdout
