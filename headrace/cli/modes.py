"""`headrace modes`: what a configuration amounts to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace import config_load
from headrace.cli import options
from headrace.modes import describe, warnings

DESCRIPTION = "Print the mode of a configuration, its bounds, and what to change for the next mode."


def arguments(parser: argparse.ArgumentParser) -> None:
    options.configuration(parser)


def main(args: argparse.Namespace) -> int:
    return modes(args.config, args.overrides)


def modes(config_path: Path, overrides: Sequence[str]) -> int:
    """The command; returns the exit code. Raises ConfigError."""
    config = config_load.load(config_path, overrides)
    print("\n".join(describe(config)))
    for text in warnings(config):
        print(f"warning: {text}", file=sys.stderr)
    return 0
