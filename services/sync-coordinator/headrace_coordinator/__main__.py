"""`headrace-coordinator`: membership, policy version and sync rounds over gRPC."""

from __future__ import annotations

from headrace.service.early_stop import end_when_told

end_when_told(0)  # before the other imports, which take seconds

# ruff: noqa: E402

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from headrace.service.shell import Shell

SHELL = Shell(
    "coordinator",
    "Membership, policy version and sync rounds of a run, over gRPC.",
    work="headrace_coordinator.service",
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = SHELL.parser()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=50051, help="port to listen on (default: 50051)")
    parser.add_argument("--socket", type=Path, help="listen on this Unix socket instead of host and port")
    parser.add_argument("--metrics-port", type=int, default=0, help="Prometheus port; 0 for none")
    SHELL.run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
