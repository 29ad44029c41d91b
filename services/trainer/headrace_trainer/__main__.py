"""`headrace-trainer`: starts this node's ranks under torchrun and passes stops on to them.

torchrun's rendezvous store lives in another process (HEADRACE_RDZV, host:port). Exit codes: 0 run
complete, 75 stopped in order and resumable, 69 Redis unreachable, 78 wrong configuration, 1 failure.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from headrace import logs, tls
from headrace.config_load import ConfigError, load
from headrace.cores import bind
from headrace.net import interface_address

EX_CONFIG = 78


def _die_with_parent() -> None:
    """Linux: the child gets SIGTERM when this process is killed in whatever way."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace-trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration file")
    parser.add_argument("--port", type=int, default=0, help="Prometheus port of this node; 0 for none")
    parser.add_argument("--rdzv", default=os.environ.get("HEADRACE_RDZV", ""), help="host:port of the store")
    parser.add_argument("--rdzv-id", default="", help="fresh for each attempt; all nodes give the same")
    parser.add_argument("--node-address", default="", help="address of this node that the others reach")
    args = parser.parse_args()
    logs.setup("trainer")
    try:
        config = load(args.config)
        bind(config.trainer.cpus, "trainer.cpus")
        tls.check()
    except (ConfigError, tls.TlsError) as error:
        print(error, file=sys.stderr)
        sys.exit(EX_CONFIG)
    if not args.rdzv:
        print(
            "headrace-trainer: give --rdzv or HEADRACE_RDZV, the host:port of the rendezvous", file=sys.stderr
        )
        sys.exit(EX_CONFIG)
    with tempfile.TemporaryDirectory(prefix="headrace-trainer-") as state:
        sys.exit(_run(config.trainer.nnodes, config.trainer.n_gpus_per_node, args, Path(state)))


def _run(nodes: int, per_node: int, args: argparse.Namespace, state: Path) -> int:
    host = args.rdzv.rsplit(":", 1)[0]
    command = [
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={nodes}", f"--nproc-per-node={per_node}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={args.rdzv}",
        # The store is somebody else's: it must survive us.
        "--rdzv-conf=is_host=0,timeout=600", f"--rdzv-id={args.rdzv_id or uuid.uuid4().hex}",
        f"--local-addr={args.node_address or interface_address(host)}",
        "--max-restarts=0", "-m", "headrace_trainer.worker",
        "--config", str(args.config), "--state", str(state), "--port", str(args.port),
    ]  # fmt: skip
    child = subprocess.Popen(command, preexec_fn=_die_with_parent)

    def stop(number: int, _: object) -> None:
        if (state / "stop").exists():
            child.send_signal(number)  # asked twice: no more patience
        else:
            (state / "stop").touch()  # rank 0 looks at it between updates and while it waits

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    code = child.wait()
    told = state / "exit_code"
    return int(told.read_text()) if told.exists() else code


if __name__ == "__main__":
    main()
