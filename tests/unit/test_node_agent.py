"""torchrun's agents of one launch meet at the store of the first, which listens where it was told to."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import psutil
import pytest

from headrace.config import RunConfig
from headrace.v1 import sync_pb2 as pb
from headrace_trainer import launcher
from tests.unit.test_config import GOOD
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


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_meet(tmp_path: Path, nodes: int) -> None:
    """A node that is early waits, and nobody complains when the one that serves the store is done."""
    (tmp_path / "rank.py").write_text(RANK)
    host = f"127.0.0.{nodes}"
    agents = []
    with launcher._store_socket(host) as store:
        for number in reversed(range(nodes)):
            start = pb.NodeStart(launch="L1", number=number, store=launcher._address(store))
            words = launcher._command(CONFIG, ARGS, start, store, tmp_path, tmp_path)
            words = [*words[: words.index("-m", 3)], "rank.py"]
            words = [f"--nnodes={nodes}" if w.startswith("--nnodes") else w for w in words]
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
