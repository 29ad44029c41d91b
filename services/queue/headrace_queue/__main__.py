"""`headrace-queue --config FILE --host HOST --port PORT`: start the queue service.

Environment: HEADRACE_REDIS_URL (otherwise redis.url of the configuration), HEADRACE_REDIS_PASSWORD (where the
URL has none), HEADRACE_RUN_DIR (optional; holds `eval.jsonl`, `ledger.json` and the checkpoints),
HEADRACE_TOKEN (for requests that change something). Exit codes: 0 after SIGTERM or SIGINT,
otherwise those of `headrace.system.endings`.
"""

from __future__ import annotations

from headrace.service.early_stop import end_when_told

end_when_told(0)  # before the other imports, which take seconds

# ruff: noqa: E402

from collections.abc import Sequence
from typing import NoReturn

from headrace.service.shell import Shell

SHELL = Shell("queue", "The queue service of a run.", work="headrace_queue.service")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = SHELL.parser()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    SHELL.run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
