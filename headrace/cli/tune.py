"""`headrace tune RUN key=value ...`: change eta or S during a run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import redis

from headrace.cli import options
from headrace.cli.status import no_run
from headrace.config import loading, tuning
from headrace.config.redis_memory import needed_bytes
from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect_async
from headrace.connections.redis_settings import memory_limit, server_settings
from headrace.records.json_files import read_json
from headrace.records.layout import RunLayout, find_run

EXIT_USAGE = 2

DESCRIPTION = (
    f"Change {' and '.join(tuning.GATE)} of a running run. The trainer applies them with its next "
    "snapshot; the gate follows when that is committed. "
    "kubernetes.recommendation.* and the other cluster keys that only the coordinator reads may change, "
    "too. The configuration file that the run was started from does not change."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    parser.add_argument("overrides", nargs="+", metavar="key.path=value", help="the new value")


def main(args: argparse.Namespace) -> int:
    return tune(args.run, args.overrides, args.runs_dir)


def tune(name: str, overrides: Sequence[str], runs_dir: Path) -> int:
    """The command; returns the exit code. Raises ConfigError."""
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    if layout.in_cluster:
        settings = " ".join(f"--set-json config.{text}" for text in overrides)
        print(
            f"headrace: {layout.root.name} has no runner; in a cluster use "
            f"helm upgrade RELEASE helm/headrace --values FILE {settings}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if not layout.in_use() or not layout.requested.exists():
        print(
            f"headrace: {layout.root.name} is not running; start it with {' '.join(overrides)}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    before = loading.load(layout.config)
    after = loading.load(layout.config, overrides)
    if lines := tuning.refused(before, after):
        print("\n".join(f"headrace: {line}" for line in lines), file=sys.stderr)
        return EXIT_USAGE
    what = tuning.changed(before, after)
    if not what:
        print(f"{layout.root.name}: nothing to change")
        return 0
    if why := _too_large(layout, before, after):
        print(f"headrace: {why}", file=sys.stderr)
        return EXIT_USAGE
    loading.write(loading.load(layout.requested, overrides), layout.requested)
    loading.write(after, layout.config)  # the coordinator polls this file
    print("\n".join([*what, "from the next sync on"]))
    return 0


def _too_large(layout: RunLayout, before: RunConfig, after: RunConfig) -> str | None:
    """Why the run's server has too little memory for the change; None if it fits or the server does not say.

    The coordinator would refuse the file, and so would every service that restarts while it is there.
    """
    url = (read_json(layout.endpoints) or {}).get("redis_url")
    if url is None or needed_bytes(after) <= needed_bytes(before):
        return None
    try:
        return tuning.too_large(after, asyncio.run(_memory_of(url)))
    except redis.RedisError:
        return None


async def _memory_of(url: str) -> int:
    async with connect_async(url) as client:
        return memory_limit(await server_settings(client, quiet=True))
