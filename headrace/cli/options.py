"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def configuration(parser: argparse.ArgumentParser) -> None:
    """`config`, a Path, and `overrides`, a list of `key.path=value` and of further files."""
    parser.add_argument("config", type=Path, help="configuration file (YAML)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="change a key, e.g. rollout.n=4 or trainer.resume=never; the value is YAML. The name of "
        "another YAML file (configs/modes/one_step_off.yaml) sets every key in it",
    )


def run(parser: argparse.ArgumentParser) -> None:
    """`run`, a name or a directory, and `runs_dir`, a Path."""
    parser.add_argument("run", help="name of the run, or its directory")
    runs_dir(parser)


def runs(parser: argparse.ArgumentParser) -> None:
    """`runs`, one or more names or directories, and `runs_dir`, a Path."""
    parser.add_argument("runs", nargs="+", metavar="run", help="names of runs, or their directories")
    runs_dir(parser)


def runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="directory of the runs (default: %(default)s)"
    )


def as_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def count(text: str) -> int:
    """Argument type of a count: an integer, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not possible; give 1 or more")
    return int(text)


def above_zero(text: str) -> float:
    """Argument type of a duration or a size: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:  # nan is neither
        raise argparse.ArgumentTypeError(f"{text} is not possible; give a number above 0")
    return value
