"""`headrace scale RUN rollouter=N`: change the number of rollouters during a run."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import redis

from headrace.cli import options
from headrace.cli.status import no_run
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.local.scaling import LARGEST, ask
from headrace.records.json_files import read_json
from headrace.records.layout import RunLayout, find_run

EXIT_FAILED, EXIT_USAGE = 1, 2
_POLL_S = 0.2


DESCRIPTION = (
    "Change the number of rollouters of a running run. New ones join without pausing the others. Those "
    "that leave save their unfinished work for the rest. With none, the trainer waits."
)

EXIT_CODES = {
    0: "requested; with `--wait`: that many take part",
    1: "with `--wait`: the number was not reached in time, or the run ended",
    2: "there is no such run, it is not running, or the request is invalid",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    parser.add_argument("wish", metavar="rollouter=N", help="the new number of rollouters")
    parser.add_argument(
        "--wait",
        nargs="?",
        type=float,
        const=300.0,
        metavar="SECONDS",
        help="return once exactly that many take part (default: 300 seconds at most)",
    )


def main(args: argparse.Namespace) -> int:
    return scale(args.run, args.wish, args.runs_dir, wait_s=args.wait)


def scale(name: str, wish: str, runs_dir: Path, *, wait_s: float | None) -> int:
    """The command; returns the exit code. `wait_s`: seconds to wait until that many take part."""
    service, _, count = wish.partition("=")
    if service != "rollouter" or not count.isdigit() or int(count) > LARGEST:
        print(
            f"headrace: {wish!r}: give rollouter=N, with N from 0 to {LARGEST}; the other services have a "
            "fixed number",
            file=sys.stderr,
        )
        return EXIT_USAGE
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    if layout.in_cluster:
        print(
            f"headrace: {layout.root.name} has no runner; in a cluster use "
            f"kubectl scale deployment/RELEASE-rollouter --replicas={count}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if not layout.in_use():
        print(
            f"headrace: {layout.root.name} is not running; start it with rollout.replicas={count}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    wanted = int(count)
    ask(layout, wanted)
    if wait_s is None:
        print(f"{layout.root.name}: {wanted} rollouters requested; headrace status shows which take part")
        return 0
    return _wait(layout, wanted, wait_s)


def _wait(layout: RunLayout, wanted: int, wait_s: float) -> int:
    deadline = time.monotonic() + wait_s
    while (there := _members(layout)) != wanted:
        if not layout.in_use():
            print(f"headrace: {layout.root.name} has ended in the meantime", file=sys.stderr)
            return EXIT_FAILED
        if time.monotonic() > deadline:
            seen = "an unknown number of" if there is None else there
            print(
                f"headrace: {seen} rollouters take part after {wait_s:g} s, {wanted} were requested; "
                f"their logs: {layout.logs}/rollouter-*.log",
                file=sys.stderr,
            )
            return EXIT_FAILED
        time.sleep(_POLL_S)
    print(f"{layout.root.name}: {wanted} rollouters take part")
    return 0


def _members(layout: RunLayout) -> int | None:
    """Members according to the last commit or admission; None if the ledger does not answer."""
    ends = read_json(layout.endpoints)
    if ends is None:
        return None
    try:
        with connect(ends["redis_url"], timeout_s=3.0) as client:
            return len(SyncLedger(client, ends["run"], retry_s=1.0).run(ops.stats()).members)
    except (LedgerError, redis.RedisError, OSError):
        return None
