"""`headrace audit`: is every issued sample in exactly one place, and was each trained one trained once?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace import trained_log
from headrace.cli import options
from headrace.cli.ledger_of_run import NoLedger, ledger_of
from headrace.cli.status import no_run
from headrace.ledger.audit import compare, read_op, states
from headrace.runner.layout import RunLayout, find_run, read_rows
from headrace.runner.summary import balance_line

EXIT_UNBALANCED, EXIT_USAGE = 1, 2


DESCRIPTION = (
    "Check that every issued sample is in exactly one place. Reads the run's server if it is up, "
    "else starts the bundled server on the run's files. Exit code 1 if the ledger does not balance."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)


def main(args: argparse.Namespace) -> int:
    return audit(args.run, args.runs_dir)


def audit(name: str, runs_dir: Path) -> int:
    """The command; returns the exit code. Raises ConfigError, ValkeyError, LedgerError, RunInUseError."""
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    ended_in_order = not layout.in_use() and _ended_in_order(layout)
    try:
        with ledger_of(layout) as found:
            raw = found.ledger.run(read_op())
    except NoLedger as error:
        print(f"headrace: {error}", file=sys.stderr)
        return EXIT_USAGE
    report, path = compare(raw), trained_log.read_path(read_rows(layout.trained))
    problems = path.problems
    if ended_in_order:  # else the ledger and the file may be a step, or the half of a recovery, apart
        problems = problems + trained_log.compare(path, states(raw))
    print(report.text())
    print(balance_line(report.issued_total, report.counts, report.balanced))
    print("\n".join(problems) or trained_log.summary_line(path))
    return 0 if report.balanced and not problems else EXIT_UNBALANCED


def _ended_in_order(layout: RunLayout) -> bool:
    """Whether the last start of the run wrote a summary, and its trainer ended by itself."""
    summary = layout.read_summary() or {}
    if not summary.get("in_order"):
        return False
    last_step = layout.trained.stat().st_mtime if layout.trained.exists() else 0.0
    return layout.summary.stat().st_mtime >= last_step
