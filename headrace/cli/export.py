"""`headrace export`: write a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace.cli import options
from headrace.cli.status import no_run
from headrace.config import loading
from headrace.records.checkpoints import complete_checkpoints
from headrace.records.layout import find_run

EXIT_FAILED, EXIT_USAGE = 1, 2


DESCRIPTION = "Write the policy of a checkpoint as a directory that transformers and vLLM load."


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    parser.add_argument("--step", type=int, metavar="K", help="of this step (default: the newest)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty directory")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="accept a checkpoint of an earlier release, whose metadata is a pickle; code in it is executed",
    )


def main(args: argparse.Namespace) -> int:
    return export(args.run, args.runs_dir, args.step, args.out, args.trust_pickle)


def export(name: str, runs_dir: Path, step: int | None, out: Path, trust_pickle: bool = False) -> int:
    """The command; returns the exit code.

    `step`: None takes the newest checkpoint. `trust_pickle`: accept a checkpoint of an earlier release, and
    run the code in its metadata.
    """
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    there = {int(d.name.removeprefix("step_")): d for d in complete_checkpoints(layout.checkpoints)}
    shown = ", ".join(map(str, there)) or "none"
    if not there or (step is not None and step not in there):
        print(
            f"headrace: {layout.root.name} has no checkpoint of step {step}; there are: {shown}"
            if step is not None
            else f"headrace: {layout.root.name} has no checkpoint yet (trainer.save_freq)",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        print(f"headrace: {out} exists and is not empty; choose another --out", file=sys.stderr)
        return EXIT_USAGE
    checkpoint = there[max(there) if step is None else step]
    from headrace_trainer.checkpoints.export import export_checkpoint  # torch takes seconds to import

    try:
        export_checkpoint(loading.load(layout.config), checkpoint, out, trust_pickle)
    except ValueError as error:
        print(f"headrace: {error}", file=sys.stderr)
        if len(there) > 1:
            print(f"headrace: --step exports another one; there are: {shown}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{checkpoint.name} of {layout.root.name} is in {out}; transformers and vLLM load it")
    return 0
