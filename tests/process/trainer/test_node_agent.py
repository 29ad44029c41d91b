"""torchrun's agents of one launch meet at the store of the first, which listens where it was told to."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from headrace.config.run import RunConfig
from headrace.connections.net import free_port
from headrace.v1 import sync_pb2 as pb
from headrace_trainer.launch import launcher, verdict
from tests.fast.config.test_config import GOOD
from tests.traps import set_traps, sprung
from tests.waiting import until

CONFIG = RunConfig.model_validate({**GOOD, "trainer": {"n_gpus_per_node": 1}})
ARGS = argparse.Namespace(config="run.yaml", host="", port=0)
RANK = """
import pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
pathlib.Path(f"rank-{dist.get_rank()}").write_text(str(int(number)))
dist.barrier()
dist.destroy_process_group()
"""


KILLED = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def command_of(
    store: socket.socket, folder: Path, ranks: int, number: int = 0, nodes: int = 1, address: str = ""
) -> list[str]:
    """As the launcher starts it, but for the program of the ranks."""
    start = pb.NodeStart(launch="L1", number=number, store=address or launcher._address(store))
    words = launcher._command(CONFIG, ARGS, start, store, folder, folder)
    changed = {"--nnodes": str(nodes), "--nproc-per-node": str(ranks)}
    words = [f"{key}={changed[key]}" if (key := w.split("=")[0]) in changed else w for w in words]
    return [*words[: words.index("-m", words.index("--no-python"))], "rank.py"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_meet(tmp_path: Path, nodes: int) -> None:
    """A node that is early waits, and nobody complains when the one that serves the store is done.

    Neither agents nor ranks import what lies in the working directory."""
    set_traps(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    host = f"127.0.0.{nodes}"
    agents = []
    with launcher._store_socket(host) as store:
        for number in reversed(range(nodes)):
            words = command_of(store, tmp_path, ranks=1, number=number, nodes=nodes)
            with (tmp_path / f"agent-{number}").open("wb") as log:
                agents.append(
                    subprocess.Popen(words, cwd=tmp_path, stderr=log, pass_fds=[store.fileno()][number:])
                )
        server = psutil.Process(agents[-1].pid)
    listening = until(
        lambda: {c.laddr.ip for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN},
        "the store",
    )
    assert listening == {host}
    logs = [(tmp_path / f"agent-{number}") for number in range(nodes)]
    assert [agent.wait(120) for agent in agents] == [0] * nodes, [log.read_text() for log in logs]
    ranks = nodes * CONFIG.trainer.n_gpus_per_node
    assert {file.name: file.read_text() for file in tmp_path.glob("rank-*")} == {
        f"rank-{rank}": str(ranks) for rank in range(ranks)
    }
    assert not [log for log in logs if "Traceback" in log.read_text()]
    assert sprung(tmp_path) == []


def test_a_rank_that_was_killed_is_named_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(KILLED)
    with launcher._store_socket("127.0.0.1") as store:
        done = subprocess.run(
            command_of(store, tmp_path, ranks=2),
            cwd=tmp_path,
            pass_fds=[store.fileno()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = verdict.find(tmp_path)
    assert found is not None
    assert found.code == 1
    assert found.reason.startswith("rank 1 (process ")
    assert "was killed by SIGKILL" in found.reason


def test_a_first_node_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Without the page that torch would write about it."""
    gone = f"127.0.0.1:{free_port()}"
    with launcher._store_socket("127.0.0.2") as store:
        words = command_of(store, tmp_path, ranks=1, number=1, nodes=2, address=gone)
    words = [w.replace("timeout=600", "timeout=2") for w in words]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    found = verdict.find(tmp_path)
    assert found is not None
    assert found.reason.startswith(f"the ranks could not meet at {gone}: ")


def test_ranks_that_a_signal_ends_have_not_stopped_in_order(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)")
    with launcher._store_socket("127.0.0.1") as store:
        agent = subprocess.Popen(
            command_of(store, tmp_path, ranks=1), cwd=tmp_path, pass_fds=[store.fileno()]
        )
    until((tmp_path / "up").exists, "the rank to be up")
    agent.terminate()
    assert agent.wait(60) == 1
    found = verdict.find(tmp_path)
    assert found == verdict.LaunchVerdict(1, "SIGTERM has ended the ranks before they had saved")


def test_ranks_end_with_their_agent_however_it_ends(tmp_path: Path) -> None:
    """kill -9 of launcher and agent, with nobody left who would look for their ranks."""
    config = tmp_path / "run.yaml"
    os.mkfifo(config)  # a real rank, which waits here
    args = argparse.Namespace(config=config, host="", port=0)
    with launcher._store_socket("127.0.0.1") as store:
        start = pb.NodeStart(launch="L1", store=launcher._address(store))
        words = launcher._command(CONFIG, args, start, store, tmp_path, tmp_path)
        agent = subprocess.Popen(words, cwd=tmp_path, pass_fds=[store.fileno()])
    writer = until(lambda: _writer(config), "the rank to read its configuration")
    assert writer is not None
    (rank,) = psutil.Process(agent.pid).children()
    agent.kill()
    agent.wait(10)
    try:
        until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "its end", 10.0)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
        os.close(writer)


def _writer(fifo: Path) -> int | None:
    """A descriptor of its writing end, once somebody reads."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
