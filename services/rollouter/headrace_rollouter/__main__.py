"""`headrace-rollouter`: one vLLM engine; scale by running more of these."""

from __future__ import annotations

from headrace.service.early_stop import end_when_told

end_when_told(0)  # before the other imports, which take seconds

# ruff: noqa: E402

from collections.abc import Sequence
from typing import NoReturn

from headrace.service.shell import Shell

SHELL = Shell(
    "rollouter",
    "One vLLM engine of a run; scale by running more of these.",
    work="headrace_rollouter.service",
    cpus=lambda config: config.rollout.cpus,
    cpus_key="rollout.cpus",
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = SHELL.parser()
    parser.add_argument("--host", default="127.0.0.1", help="where health and metrics listen")
    parser.add_argument("--port", type=int, default=8100, help="port of health and metrics")
    parser.add_argument("--replica", default="0", help="name of this replica, for logs")
    SHELL.run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
