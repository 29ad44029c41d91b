"""`headrace-trainer`: starts this node's ranks under torchrun and passes stops on to them.

With several nodes (`trainer.nnodes`) one of these runs on each, and the coordinator starts them together
(HEADRACE_COORDINATOR). Exit codes: `headrace.endings`.
"""

from __future__ import annotations

from headrace.early_stop import end_when_interrupted, end_when_told

end_when_told(75)  # before the other imports, which take seconds

# ruff: noqa: E402

import argparse
import os
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from headrace import environment, logs, tls
from headrace.config import RunConfig
from headrace.config_load import ConfigError, load
from headrace.cores import bind
from headrace.endings import EX_CONFIG, say_why
from headrace.records.layout import RunLayout


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace-trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration file")
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
    args = parser.parse_args()
    logs.setup("trainer")
    end_when_interrupted(75)
    try:
        config = load(args.config)
        bind(config.trainer.cpus, "trainer.cpus")
        tls.wait(config.services.start_timeout_s)
    except (ConfigError, tls.TlsError) as error:
        say_why("trainer", error)
        sys.exit(EX_CONFIG)
    from headrace.coordinator_stream import TokenRefused
    from headrace.service.reconnecting_stream import CoordinatorRefused
    from headrace_trainer import heartbeat
    from headrace_trainer.launcher import Launcher

    try:
        with _trace_of_others(config), tempfile.TemporaryDirectory(prefix="headrace-trainer-") as state:
            heart = heartbeat.Launch(args.heartbeat or Path(state) / "heartbeat")
            code = Launcher(config, args, Path(state), heart).run()
    except (ConfigError, TokenRefused, CoordinatorRefused, tls.TlsError) as error:
        say_why("trainer", error)
        code = EX_CONFIG
    sys.exit(code)


def _trace_of_others(config: RunConfig) -> AbstractContextManager[None]:
    """In a cluster the other pods' events come here. Not in a rank: they come also while there are none."""
    run_dir = environment.run_dir_if_set()
    if not config.trace.enable or run_dir is None or not RunLayout(run_dir).in_cluster:
        return nullcontext()
    from headrace.trace_relay import collecting

    return collecting(environment.redis_url(), config.name, run_dir)


if __name__ == "__main__":
    main()
