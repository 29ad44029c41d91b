"""`headrace status`: the state of a run.

A running run is read from its ledger, an ended one from its summary, and one in a cluster always from its
ledger.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

from headrace.cli import options
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.ledger.replies import Stats
from headrace.local.in_cluster import COMPLETED, NO_ADDRESS, look
from headrace.metrics import row_keys
from headrace.records import summary as summaries
from headrace.records.evaluations import eval_rows
from headrace.records.json_files import read_json, read_rows
from headrace.records.layout import RunLayout, find_run
from headrace.service import recommendation
from headrace.system.terminal import one_line

EXIT_FAILED, EXIT_USAGE = 1, 2

DESCRIPTION = (
    "Show a running run (from its ledger) or one that ended (from its summary). In a pod of a cluster, "
    "name the run's directory: its state comes from the ledger."
)

EXIT_CODES = {
    0: "shown; with `--watch`: the run is complete",
    1: "with `--watch`: the run failed or was killed, or the address of its ledger is unknown",
    2: "there is no such run",
    130: "with `--watch`: the run was stopped, or this command was",
}
JSON = {
    "state": "`running`, `completed`, `stopped`, `failed` or `killed`; `unknown` for a run in a cluster "
    "whose ledger cannot be read",
    "directory": "of the run",
    "summary": "`summary.json`, for a run that ended",
    "services": "process id of each service, while it is running",
    "last_update": "last row of `metrics.jsonl`, while it is running, and in a cluster",
    "eval": "held-out scores so far, while it is running, and in a cluster",
    "ledger": "the ledger's counts, version, members and so on, while it is running, and in a cluster",
    "recommendation": "number of rollouters that the idle ratios suggest, and why, while it is running; null "
    "at first",
    "note": "what hinders it, if anything",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    options.as_json(parser)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="repeat every SECONDS (default: 2) until the run ends; the exit code is then that of the run: "
        "0 completed, 130 stopped, 1 failed or killed",
    )


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds; put the run first: headrace status RUN --watch"
        ) from None


def main(args: argparse.Namespace) -> int:
    if args.watch is not None and not 0 < args.watch <= 3600:
        print(f"headrace: --watch {args.watch:g}: give seconds above 0, 3600 at most", file=sys.stderr)
        return EXIT_USAGE
    return status(args.run, args.runs_dir, as_json=args.json, watch_s=args.watch)


def status(name: str, runs_dir: Path, *, as_json: bool, watch_s: float | None = None) -> int:
    """The command; returns the exit code. `watch_s`: repeat at this interval until the run ends."""
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    if watch_s is not None:
        return _watch(layout, watch_s, as_json)
    facts = facts_of(layout)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(text(facts, layout)))
    return 0


def _watch(layout: RunLayout, every_s: float, as_json: bool) -> int:
    """Repeat until the run ends; JSON is one line each time."""
    from headrace.local import watch

    if layout.in_cluster:
        while True:
            facts = in_cluster(layout)
            print(json.dumps(facts) if as_json else "\n".join(text(facts, layout)), flush=True)
            if facts["state"] == COMPLETED:
                return 0
            if facts.get("note") == NO_ADDRESS:
                return EXIT_FAILED
            time.sleep(every_s)
    if as_json:
        while layout.in_use():
            print(json.dumps(live(layout)), flush=True)
            time.sleep(every_s)
        print(json.dumps(ended(layout)), flush=True)
    else:
        watch.watch(layout, every_s, sys.stdout)
        print("\n".join(text(ended(layout), layout)))
    return watch.EXIT_CODES.get(watch.how_it_ended(layout), EXIT_FAILED)


def no_run(name: str, runs_dir: Path) -> str:
    """The message for a run that does not exist; lists the known runs."""
    known = sorted(p.parent.name for p in runs_dir.glob("*/config.yaml")) if runs_dir.is_dir() else []
    there = f"known there: {', '.join(known)}" if known else "no runs there"
    return f"headrace: no run {name!r} in {runs_dir} and no such directory; {there}"


def facts_of(layout: RunLayout) -> dict[str, Any]:
    if layout.in_cluster:
        return in_cluster(layout)
    return live(layout) if layout.in_use() else ended(layout)


def in_cluster(layout: RunLayout) -> dict[str, Any]:
    """Facts about a run without a runner, from its files and ledger."""
    rows, reading = read_rows(layout.metrics), look(layout)
    facts: dict[str, Any] = {
        "state": reading.state,
        "directory": str(layout.root),
        "last_update": rows[-1] if rows else None,
        "eval": eval_rows(layout.eval),
    }
    if reading.stats is not None:
        facts |= {"ledger": ledger_facts(reading.stats), "recommendation": reading.advice}
    return facts if reading.note is None else {**facts, "note": reading.note}


def live(layout: RunLayout) -> dict[str, Any]:
    """Facts about a running run, from its files and ledger."""
    facts: dict[str, Any] = {"state": "running", "directory": str(layout.root)}
    ends = read_json(layout.endpoints)
    if ends is None:
        return {**facts, "note": "still starting"}
    facts["services"] = ends.get("pids", {})
    rows = read_rows(layout.metrics)
    facts["last_update"] = rows[-1] if rows else None
    facts["eval"] = eval_rows(layout.eval)
    try:
        with connect(ends["redis_url"], timeout_s=3.0) as client:
            stats = SyncLedger(client, ends["run"], retry_s=1.0).run(ops.stats())
            advice = recommendation.decode(client.get(recommendation.recommendation_key(ends["run"])))
        facts["ledger"] = ledger_facts(stats)
        facts["recommendation"] = advice
    except (LedgerError, redis.RedisError, OSError) as error:
        facts["note"] = f"its ledger cannot be read: {error}"
    return facts


def ledger_facts(stats: Stats) -> dict[str, Any]:
    return {**asdict(stats), "balanced": stats.balanced}


def ended(layout: RunLayout) -> dict[str, Any]:
    """The summary, or a note that the run left none."""
    summary = layout.read_summary()
    if summary is not None:
        return {"state": summary.get("status"), "directory": str(layout.root), "summary": summary}
    return {
        "state": "killed",
        "directory": str(layout.root),
        "note": "no process and no summary: it was killed, or never got past its start; "
        "start it again with the same command to resume",
    }


def text(facts: dict[str, Any], layout: RunLayout) -> list[str]:
    """The facts as lines of text."""
    if "summary" in facts:
        return summaries.lines(facts["summary"], layout)
    out = [f"{layout.root.name}: {facts['state']} in {facts['directory']}"]
    row = facts.get("last_update")
    if row:
        reward = row.get(row_keys.REWARD_MEAN)
        shown = f", reward {reward:.3f}" if isinstance(reward, float) else ""
        idle = summaries.percent(row.get(row_keys.TRAINER_IDLE_RATIO))
        out.append(f"step {row.get('step', '?')}{shown}, trainer idle {idle}")
    ledger = facts.get("ledger")
    if ledger:
        counts = ledger["counts"]
        held = ", takes held" if ledger["held"] else ""
        out.append(
            f"policy version {ledger['version']}, lineage {ledger['lineage']}, {ledger['phase']}{held}; "
            f"{len(ledger['members'])} rollouters taking part"
        )
        out.append(", ".join(f"{counts[state]} {state}" for state in summaries.STATES))
        out += summaries.kept_lines(ledger["kept"])
        if advice := facts.get("recommendation"):
            out.append(f"recommended rollouters: {advice['rollouters']} ({advice['why']})")
        if ledger["dead_reasons"]:
            out.append("dead: " + ", ".join(f"{n} {why}" for why, n in ledger["dead_reasons"].items()))
    for score in facts.get("eval", [])[-4:]:
        if score["reward"] is not None:
            out.append(
                f"held-out {score['data_source']} at version {score['version']}: {score['reward']:.3f}"
            )
    if facts.get("services"):
        out.append("processes: " + ", ".join(f"{n} {pid}" for n, pid in facts["services"].items()))
    if facts.get("note"):
        out.append(facts["note"])
    return [one_line(line) for line in out]
