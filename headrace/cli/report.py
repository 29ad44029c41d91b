"""`headrace report`: write one HTML page about one run, or several side by side."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from headrace.cli import options
from headrace.cli.samples import decoder_of
from headrace.cli.status import no_run
from headrace.records.layout import RunLayout, find_run

EXIT_USAGE = 2

DESCRIPTION = (
    "Write one HTML page that shows how runs went: scores, idle time, phases, staleness, lengths, queue, "
    "sync, policy, samples, and what was configured differently. The page needs no network. Works during a "
    "run, too."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    options.runs(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    layouts: list[RunLayout] = []
    for name in args.runs:
        layout = find_run(name, args.runs_dir)
        if layout is None:
            print(no_run(name, args.runs_dir), file=sys.stderr)
            return EXIT_USAGE
        if layout.root not in [known.root for known in layouts]:
            layouts.append(layout)
    if args.out.is_dir():
        print(f"headrace: --out {args.out} is a directory: name a file in it", file=sys.stderr)
        return EXIT_USAGE
    if not args.out.parent.is_dir():
        print(f"headrace: --out {args.out}: there is no directory {args.out.parent}", file=sys.stderr)
        return EXIT_USAGE
    from headrace.report.collect import collect
    from headrace.report.page import render

    page = render(collect(layouts, [decoder_of(layout) for layout in layouts]))
    partial = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    partial.write_text(page, encoding="utf-8")
    partial.replace(args.out)
    print(f"{args.out}: {len(page.encode()) // 1024} KiB, open it in a browser")
    return 0
