"""One trainer rank as a process, started by torchrun: its exit code, and what it says when it must end."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path

import torch
from prometheus_client import REGISTRY, start_http_server

from headrace import environment, logs
from headrace.comm import CommunicatorError, nccl_version
from headrace.config_load import ConfigError, load
from headrace.ledger.client import AdoptError, LedgerUnavailable, LoginRefused
from headrace.runner.in_cluster import leave_config
from headrace_trainer import heartbeat, metrics
from headrace_trainer.batch import ClaimFailed
from headrace_trainer.checkpoint import SaveFailed
from headrace_trainer.loop import EX_STOPPED, NotFinite, Trainer, sync_limit_s
from headrace_trainer.ranks import Ranks
from headrace_trainer.sync_client import SyncFailed

log = logging.getLogger("headrace.trainer")

EX_UNAVAILABLE, EX_CONFIG = 69, 78


def main() -> None:
    parser = argparse.ArgumentParser(description="One trainer rank; started by torchrun.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host", default="", help="where metrics listen; default: services.host")
    parser.add_argument("--port", type=int, default=0, help="Prometheus port of this node; 0 for none")
    parser.add_argument("--state", type=Path, required=True, help="directory shared with the launcher")
    parser.add_argument("--heartbeat", type=Path, help="directory of this node's heartbeats")
    args = parser.parse_args()
    logs.setup(f"trainer-{os.environ.get('RANK', '0')}")
    if args.heartbeat is not None:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        heartbeat.begin(heartbeat.rank_file(args.heartbeat, rank))
        metrics.show_heartbeat(args.heartbeat)
    code = 1
    try:
        config = load(args.config)
        nccl_version(config.sync.transport)  # a missing NCCL shows before the model loads
        torch.set_num_threads(config.trainer.omp_threads)
        # Ranks wait for each other while rank 0 waits for samples or for a commit.
        longest = max(config.trainer.claim_timeout_s, sync_limit_s(config)) + 300.0
        longest += config.redis.outage_timeout_s
        ranks = Ranks(config.trainer.device, longest)
        if args.port and os.environ.get("LOCAL_RANK", "0") == "0":  # one per node
            shown = REGISTRY if ranks.is_first else metrics.process_only()
            start_http_server(args.port, args.host or config.services.host, registry=shown)
        run_dir = environment.run_dir()
        if ranks.is_first:
            leave_config(config, args.config, run_dir)
        code = Trainer(config, ranks, run_dir, args.state / "stop").run()
        ranks.close()
    except (ConfigError, AdoptError, CommunicatorError, ValueError) as error:
        log.error("cannot run", exc_info=error)
        print(f"headrace-trainer: {error}", file=sys.stderr)
        code = EX_CONFIG
    except LoginRefused as error:
        print(f"headrace-trainer: {error}", file=sys.stderr)
        code = EX_CONFIG
    except LedgerUnavailable as error:
        print(f"headrace-trainer: {error}", file=sys.stderr)
        code = EX_UNAVAILABLE
    except (ClaimFailed, SyncFailed, SaveFailed, NotFinite) as error:
        print(f"headrace-trainer: {error}", file=sys.stderr)
        code = 1
    except Exception:  # any other failure ends the rank at once; torchrun ends the rest
        log.exception("rank failed")
    if code:
        # torchrun turns every failure into 1; the launcher reads the real one here.
        # The first to fail knows why; the others only see their peer vanish.
        with contextlib.suppress(FileExistsError), (args.state / "exit_code").open("x") as told:
            told.write(str(code))
    sys.stderr.flush()
    if code not in (0, EX_STOPPED):
        os._exit(1)  # other threads may be inside a collective that never ends
    sys.exit(0)


if __name__ == "__main__":
    main()
