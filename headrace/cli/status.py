"""`headrace status`: a run that is on from its ledger, one that ended from its summary."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

from headrace import recommendation
from headrace.cli import options
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.ledger.replies import Stats
from headrace.redis_connect import connect
from headrace.runner import summary as summaries
from headrace.runner.layout import RunLayout, find_run, read_json, read_rows

EXIT_USAGE = 2

DESCRIPTION = "Show a run that is on (from its ledger) or one that ended (from its summary)."


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    options.as_json(parser)


def main(args: argparse.Namespace) -> int:
    return status(args.run, args.runs_dir, as_json=args.json)


def status(name: str, runs_dir: Path, *, as_json: bool) -> int:
    """The command; returns the exit code."""
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    facts = live(layout) if layout.in_use() else ended(layout)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(text(facts, layout)))
    return 0


def no_run(name: str, runs_dir: Path) -> str:
    """The message for a run that is not there, with those that are."""
    known = sorted(p.parent.name for p in runs_dir.glob("*/config.yaml")) if runs_dir.is_dir() else []
    there = f"known there: {', '.join(known)}" if known else "no runs there"
    return f"headrace: no run {name!r} in {runs_dir} and no such directory; {there}"


def live(layout: RunLayout) -> dict[str, Any]:
    """What a run that is on tells about itself."""
    facts: dict[str, Any] = {"state": "running", "directory": str(layout.root)}
    ends = read_json(layout.endpoints)
    if ends is None:
        return {**facts, "note": "still starting"}
    facts["services"] = ends.get("pids", {})
    rows = read_rows(layout.metrics)
    facts["last_update"] = rows[-1] if rows else None
    facts["eval"] = summaries.eval_rows(layout.eval)
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
    """The summary, or what is known of a run that left none."""
    summary = layout.read_summary()
    if summary is not None:
        return {"state": summary.get("status"), "directory": str(layout.root), "summary": summary}
    return {
        "state": "killed",
        "directory": str(layout.root),
        "note": "no process and no summary: it was killed, or never got past its start; "
        "start it again with the same command to go on",
    }


def text(facts: dict[str, Any], layout: RunLayout) -> list[str]:
    """The same for people."""
    if "summary" in facts:
        return summaries.lines(facts["summary"], layout)
    out = [f"{layout.root.name}: {facts['state']} in {facts['directory']}"]
    row = facts.get("last_update")
    if row:
        reward = row.get("reward/mean")
        shown = f", reward {reward:.3f}" if isinstance(reward, float) else ""
        idle = summaries.percent(row.get("trainer/idle_ratio"))
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
    return out
