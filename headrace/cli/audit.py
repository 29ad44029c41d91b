"""`headrace audit`: is every issued sample in exactly one place, and was each trained one trained once?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace import trained_log
from headrace.cli import options
from headrace.cli.ledger_of_run import NoLedger, ledger_of
from headrace.cli.status import no_run
from headrace.ledger import ops
from headrace.ledger.audit import AuditReport, compare, read_op, states
from headrace.runner.layout import RunLayout, find_run, read_rows
from headrace.runner.summary import balance_line, kept_lines
from headrace.terminal import one_line

EXIT_UNBALANCED, EXIT_USAGE = 1, 2


DESCRIPTION = (
    "Check that every issued sample is in exactly one place. Reads the run's server if it is up, "
    "else starts the bundled server on the run's files. Exit code 1 if the ledger does not balance."
)

EXIT_CODES = {
    0: "every sample is in exactly one place and was trained at most once",
    1: "the ledger does not balance, or cannot be read",
}
JSON = {
    "run": "name",
    "balanced": "whether nothing is wrong: `problems` is empty",
    "issued_total": "samples that were ever issued",
    "counts": "samples by state",
    "tokens": "by state: `samples`, `mean` and `largest` of their groups' tokens, where known",
    "lineages": "starts of the trainer",
    "steps": "of the path to the present weights",
    "trained_once": "samples on that path",
    "taken_back": "samples of steps that a later start took back",
    "problems": "one sentence each",
    "kept": "finished and parked samples that new trainers have kept, by the state they were found in",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    options.as_json(parser)


def main(args: argparse.Namespace) -> int:
    return audit(args.run, args.runs_dir, as_json=args.json)


def audit(name: str, runs_dir: Path, *, as_json: bool = False) -> int:
    """The command; returns the exit code. Raises ConfigError, ValkeyError, LedgerError, RunInUseError."""
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    ended_in_order = not layout.in_use() and _ended_in_order(layout)
    try:
        with ledger_of(layout) as found:
            stats = found.ledger.run(ops.stats())
            if found.in_cluster:
                ended_in_order = stats.completed
            raw = found.ledger.run(read_op())
    except NoLedger as error:
        print(f"headrace: {error}", file=sys.stderr)
        return EXIT_USAGE
    report, path = compare(raw), trained_log.read_path(read_rows(layout.trained))
    problems = path.problems
    if ended_in_order:  # else the ledger and the file may be a step, or the half of a recovery, apart
        problems = problems + trained_log.compare(path, states(raw))
    if as_json:
        print(json.dumps({**facts(layout.root.name, report, path, problems), "kept": stats.kept}, indent=2))
    else:
        balance = balance_line(report.issued_total, report.counts, report.balanced)
        print("\n".join([report.text(), balance, *kept_lines(stats.kept)]))
        print("\n".join(map(one_line, problems)) or trained_log.summary_line(path))
    return 0 if report.balanced and not problems else EXIT_UNBALANCED


def facts(
    run: str, report: AuditReport, path: trained_log.TrainedPath, problems: list[str]
) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "run": run,
        "balanced": report.balanced and not problems,
        "issued_total": report.issued_total,
        "counts": report.counts,
        "tokens": {state: asdict(found) for state, found in report.lengths.items()},
        "lineages": path.lineages,
        "steps": len(path.steps),
        "trained_once": len(set(path.ids)),
        "taken_back": path.taken_back,
        "problems": report.problems + problems,
    }


def _ended_in_order(layout: RunLayout) -> bool:
    """Whether the last start of the run wrote a summary, and its trainer ended by itself."""
    summary = layout.read_summary() or {}
    if not summary.get("in_order"):
        return False
    last_step = layout.trained.stat().st_mtime if layout.trained.exists() else 0.0
    return layout.summary.stat().st_mtime >= last_step
