"""One trainer rank as a process, started by torchrun: its exit code, and its message when it fails."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path

import torch
from prometheus_client import REGISTRY

from headrace.config.algorithm_checks import load_algorithms
from headrace.config.loading import load
from headrace.connections import variables
from headrace.ledger.client import AdoptError
from headrace.records.checkpoints import CheckpointError
from headrace.records.layout import leave_config
from headrace.service.exit_codes import common_exit_code
from headrace.service.metrics_server import serve_metrics
from headrace.service.spawn import die_with
from headrace.system import logs
from headrace.system.endings import EX_BEYOND_REPAIR, EX_CONFIG, EX_FAILED, EX_STOPPED
from headrace.weights.transports import CommunicatorError, library_version
from headrace_trainer.checkpoints.checkpoint import SaveFailed
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks, keep_to_share
from headrace_trainer.launch import verdict
from headrace_trainer.launch.launcher import AGENT
from headrace_trainer.launch.verdict import LaunchVerdict
from headrace_trainer.learning.batch import ClaimFailed, RefillExhausted, TrainerSuperseded
from headrace_trainer.loop import NotFinite, NothingTrained, Trainer
from headrace_trainer.records import metrics
from headrace_trainer.sync.rounds import sync_limit_s
from headrace_trainer.sync.sync_client import SyncFailed, SyncRefused

log = logging.getLogger("headrace.trainer")


def main() -> None:
    parser = argparse.ArgumentParser(description="One trainer rank; started by torchrun.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host", default="", help="where metrics listen; default: services.host")
    parser.add_argument("--port", type=int, default=0, help="Prometheus port of this node; 0 for none")
    parser.add_argument("--state", type=Path, required=True, help="directory shared with the launcher")
    parser.add_argument("--heartbeat", type=Path, help="directory of this node's heartbeats")
    args = parser.parse_args()
    if agent := os.environ.get(AGENT):
        die_with(int(agent))()
    logs.setup(f"trainer-{os.environ.get('RANK', '0')}")
    if args.heartbeat is not None:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        heartbeat.begin(heartbeat.rank_file(args.heartbeat, rank))
        metrics.show_heartbeat(args.heartbeat)
    try:
        ended = LaunchVerdict(run(args))
    except Exception as error:  # last resort of a rank; torchrun ends the others
        code = exit_code(error)
        ended = LaunchVerdict(code or EX_FAILED, str(error) if code else f"{type(error).__name__}: {error}")
        if not verdict.leave(args.state, ended):  # all ranks fail alike, or this one has lost its peers
            log.info("ends with the others", extra={"reason": ended.reason})
        else:
            known = code is not None and type(error) is not ValueError
            log.error("cannot go on", exc_info=None if known else error, extra={"reason": ended.reason})
    if ended.code == EX_STOPPED:
        verdict.leave(args.state, ended)
    with contextlib.suppress(OSError):  # disk full
        sys.stderr.flush()
    if ended.code not in (0, EX_STOPPED):
        os._exit(1)  # other threads may be inside a collective that never ends
    sys.exit(0)


def run(args: argparse.Namespace) -> int:
    """Run the rank to its end. Returns its exit code if it ends in order."""
    config = load(args.config)
    load_algorithms(config)
    library_version(config.sync.transport)  # fails on a missing library before the model loads
    torch.set_num_threads(config.trainer.omp_threads)
    # Other ranks wait in collectives while rank 0 waits for samples or for a commit.
    longest = max(config.trainer.claim_timeout_s, sync_limit_s(config)) + 300.0
    longest += config.redis.outage_timeout_s
    ranks = Ranks(config.trainer.device, longest)
    if config.gpu_sharing is not None:
        keep_to_share(ranks.device, config.gpu_sharing)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one per node
        shown = REGISTRY if ranks.is_first else metrics.process_only()
        serve_metrics(args.host or config.services.host, args.port, shown)
    run_dir = variables.run_dir()
    if ranks.is_first:
        leave_config(config, args.config, run_dir)
    code = Trainer(config, ranks, run_dir, args.state / "stop").run()
    ranks.close()
    return code


def exit_code(error: Exception) -> int | None:
    """Exit code of a known failure; None for any other. A failure that a restart may cure is not final."""
    match error:
        case CheckpointError():  # damaged, another run's, or of an abandoned history
            return EX_BEYOND_REPAIR
        case CommunicatorError() | SyncRefused() | ValueError():
            return EX_CONFIG
        case AdoptError():
            return EX_BEYOND_REPAIR  # weights and ledger disagree about what was trained
        case TrainerSuperseded() | RefillExhausted() | NothingTrained() | NotFinite():
            return EX_BEYOND_REPAIR  # the same checkpoint and data would fail here again
        case ClaimFailed() | SyncFailed() | SaveFailed():
            return EX_FAILED  # a new lineage brings every engine up to date; a disk may have room again
    return common_exit_code(error)


if __name__ == "__main__":
    main()
