"""`headrace modes`: show the mode of a configuration and its bounds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.cli import options
from headrace.config import loading
from headrace.config.modes import describe, warnings
from headrace.config.run import RunConfig

DESCRIPTION = "Print the mode of a configuration, its bounds, and what to change for the next mode."

JSON = {
    "mode": "derived from the parameters, or as set",
    "samples_per_update": "R × M",
    "samples_per_sync": "S × R × M",
    "max_required": "most samples started and not yet left behind by a sync",
    "largest_version_gap": "of a trained sample; null: unbounded",
    "off_policy_steps": "optimizer steps before the last one within a window",
    "warnings": "one sentence each",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.configuration(parser)
    options.as_json(parser)


def main(args: argparse.Namespace) -> int:
    return modes(args.config, args.overrides, as_json=args.json)


def modes(config_path: Path, overrides: Sequence[str], *, as_json: bool = False) -> int:
    """The command; returns the exit code. Raises ConfigError."""
    config = loading.load(config_path, overrides)
    if as_json:
        print(json.dumps(facts(config), indent=2))
        return 0
    print("\n".join(describe(config)))
    for text in warnings(config):
        print(f"warning: {text}", file=sys.stderr)
    return 0


def facts(config: RunConfig) -> dict[str, Any]:
    """What `--json` prints: the mode and its numbers, in samples, versions and optimizer steps."""
    rule = config.rule
    return {
        "mode": str(config.derived_mode),
        "samples_per_update": config.samples_per_update,
        "samples_per_sync": rule.window,
        "max_required": rule.max_required,
        "largest_version_gap": rule.largest_gap,
        "off_policy_steps": rule.off_policy_steps,
        "warnings": list(warnings(config)),
    }
