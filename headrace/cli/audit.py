"""`headrace audit`: check that every issued sample is in exactly one place and was trained at most once."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.cli import options
from headrace.cli.ledger_of_run import LostLedger, NoLedger, ledger_of
from headrace.cli.status import no_run
from headrace.records import run_records, trained_log
from headrace.records.audit import NOTHING, RunAudit, audit_run, compare_run
from headrace.records.layout import find_run
from headrace.records.summary import balance_line, kept_lines
from headrace.system.terminal import one_line

EXIT_UNBALANCED, EXIT_USAGE = 1, 2
SHOWN = 20
"""Most problems printed without `--all`."""


DESCRIPTION = (
    "Check that every issued sample is in exactly one place, and that the ledger, trained.jsonl, sync.jsonl "
    "and the checkpoints agree on what was trained and committed, id by id. Reads the run's server if it is "
    "up, else starts the bundled server on the run's files. For a run that is running or was cut off, "
    "differences that have a reason are listed with it. Exit code 1 for any other."
)

EXIT_CODES = {
    0: "every sample is in exactly one place and was trained at most once, and ledger and files agree",
    1: "the ledger does not balance, differs from the files, or cannot be read",
}
JSON = {
    "run": "name",
    "balanced": "whether nothing is wrong: `problems` is empty",
    "issued_total": "samples issued in all",
    "counts": "samples by state",
    "tokens": "by state: `samples`, `mean` and `largest` of their groups' tokens, where known",
    "lineages": "starts of the trainer",
    "steps": "of the path to the current weights",
    "trained_once": "samples on that path",
    "taken_back": "samples of steps that a later start took back",
    "problems": "one sentence each, all of them",
    "explained": "differences that have a reason, one sentence each",
    "kept": "finished and parked samples that restarted trainers kept, by the state they were in",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    options.as_json(parser)
    parser.add_argument("--all", action="store_true", help=f"print every problem, not only the first {SHOWN}")


def main(args: argparse.Namespace) -> int:
    return audit(args.run, args.runs_dir, as_json=args.json, show_all=args.all)


def audit(name: str, runs_dir: Path, *, as_json: bool = False, show_all: bool = False) -> int:
    """The command; returns the exit code. Raises ConfigError, ValkeyError, LedgerError, RunInUseError."""
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    try:
        with ledger_of(layout) as found:
            done = audit_run(layout, found.ledger, is_on=found.is_on)
    except NoLedger as error:
        records = run_records.read(layout)
        if records.is_empty or not isinstance(error, LostLedger):
            print(f"headrace: {error}", file=sys.stderr)
            return EXIT_USAGE
        done = compare_run(NOTHING, records)
    if as_json:
        print(json.dumps(facts(layout.root.name, done), indent=2))
    else:
        print("\n".join(_lines(layout.root.name, done, show_all)))
    return 0 if done.balanced else EXIT_UNBALANCED


def _lines(run: str, done: RunAudit, show_all: bool) -> list[str]:
    """The result as lines of text."""
    report = done.ledger
    out = [report.states_text(), balance_line(report.issued_total, report.counts, report.balanced)]
    out += kept_lines(done.reading.kept)
    out += [f"explained: {one_line(text)}" for text in done.explained]
    if done.balanced:
        return [*out, trained_log.summary_line(done.path)]
    shown = done.problems if show_all else done.problems[:SHOWN]
    out.append(f"{len(done.problems)} problem{'s' if len(done.problems) != 1 else ''}:")
    out += [f"  {one_line(text)}" for text in shown]
    if left := len(done.problems) - len(shown):
        out.append(f"  ... and {left} more: headrace audit {run} --all prints them, --json too")
    return [*out, NEXT]


NEXT = (
    "ledger and files do not agree on what happened: writes to one of them were lost, or somebody else wrote "
    "to it. Keep the run's directory as it is, and start nothing in it; docs/operations.md tells what the "
    "audit compares"
)


def facts(run: str, done: RunAudit) -> dict[str, Any]:
    """The output of `--json`."""
    report, path = done.ledger, done.path
    return {
        "run": run,
        "balanced": done.balanced,
        "issued_total": report.issued_total,
        "counts": report.counts,
        "tokens": {state: asdict(found) for state, found in report.lengths.items()},
        "lineages": path.lineages,
        "steps": len(path.steps),
        "trained_once": len(set(path.ids)),
        "taken_back": path.taken_back,
        "problems": done.problems,
        "explained": done.explained,
        "kept": done.reading.kept,
    }
