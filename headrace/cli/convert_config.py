"""`headrace convert-config`: convert a verl configuration, and list keys without a counterpart."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = (
    "Convert a verl configuration (YAML, interpolations included) to one of ours. Where verl's default "
    "differs from ours, verl's is written out. Keys without a counterpart are listed."
)

EXIT_CODES = {
    0: "converted; keys without a counterpart and keys still to be set are listed",
    2: "the file or an override cannot be read, or the file of `--out` exists already",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="verl configuration (YAML)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="verl keys set on its command line"
    )
    parser.add_argument("--out", type=Path, help="write the configuration there (default: print it)")


def main(args: argparse.Namespace) -> int:
    from headrace.compat.verl import translation
    from headrace.config.loading import ConfigError, read_plain

    if args.out is not None and args.out.exists():
        raise ConfigError([f"{args.out}: exists already; give another name to --out, or remove it"])
    converted = translation.convert(read_plain(args.config, args.overrides))
    text = render(converted.values, converted.defaults, args.config.name)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text, encoding="utf-8")
    for line in report(converted):
        print(line, file=sys.stderr if args.out is None else sys.stdout)
    return 0


def render(values: dict[str, Any], defaults: dict[str, Any], source: str) -> str:
    """The YAML file. Lines that come from verl's defaults are marked."""
    import yaml

    nested: dict[str, Any] = {}
    for key, value in values.items():
        node = nested
        *sections, leaf = key.split(".")
        for part in sections:
            node = node.setdefault(part, {})
        node[leaf] = value
    lines = [f"# Converted from {source}."]

    def write(node: dict[str, Any], prefix: str, indent: str) -> None:
        for name, value in node.items():
            if isinstance(value, dict) and prefix + name not in values:
                lines.append(f"{indent}{name}:")
                write(value, f"{prefix}{name}.", indent + "  ")
                continue
            dumped = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
            mark = "  # verl's default" if prefix + name in defaults else ""
            lines.append(f"{indent}{name}: {dumped.removesuffix('...' + chr(10)).strip()}{mark}")

    write(nested, "", "")
    return "\n".join(lines) + "\n"


def report(converted: Any) -> list[str]:
    """The report for the user: what was converted, left out, and is still to be set."""
    from pydantic import ValidationError

    from headrace.config.loading import describe
    from headrace.config.run import RunConfig

    plain: dict[str, Any] = {}
    for key, value in converted.values.items():
        node = plain
        *sections, leaf = key.split(".")
        for part in sections:
            node = node.setdefault(part, {})
        node[leaf] = value
    out = [f"{len(converted.values)} keys, {len(converted.defaults)} of them verl's defaults, written out"]
    if converted.left_out:
        out.append("no counterpart:")
        out += [f"  {key}: {why}" for key, why in converted.left_out]
    try:
        RunConfig.model_validate(plain)
    except ValidationError as error:
        out.append("still to be set:")
        out += [f"  {line}" for line in describe(error)]
    return out
