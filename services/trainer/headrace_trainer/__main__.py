"""`headrace-trainer`: starts this node's ranks under torchrun and forwards stop requests to them.

With several nodes (`trainer.nnodes`) one of these runs on each, and the coordinator starts them together
(HEADRACE_COORDINATOR). Exit codes: `headrace.system.endings`.
"""

from __future__ import annotations

from headrace.service.early_stop import end_when_told

end_when_told(75)  # before the other imports, which take seconds

# ruff: noqa: E402

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from headrace.service.shell import Shell
from headrace.system.endings import EX_STOPPED

SHELL = Shell(
    "trainer",
    "This node's ranks of a run's trainer, under torchrun.",
    work="headrace_trainer.service",
    told=EX_STOPPED,
    cpus=lambda config: config.trainer.cpus,
    cpus_key="trainer.cpus",
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = SHELL.parser()
    parser.add_argument("--host", default="", help="where metrics listen; default: services.host")
    parser.add_argument("--port", type=int, default=0, help="Prometheus port of this node; 0 for none")
    parser.add_argument(
        "--node-address",
        default=os.environ.get("HEADRACE_NODE_ADDRESS", ""),
        help="address of this node that the others reach; default: the one that faces the coordinator",
    )
    parser.add_argument("--node-name", default="", help="name of this node, for logs; default: the host's")
    parser.add_argument(
        "--heartbeat", type=Path, help="directory of its own for heartbeats, which a liveness probe looks at"
    )
    parser.add_argument(
        "--stay", action="store_true", help="once the run is complete, wait to be stopped instead of exiting"
    )
    SHELL.run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
