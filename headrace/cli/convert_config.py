"""`headrace convert-config`: a configuration of verl's as one of ours, and what has no counterpart."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = (
    "Read a configuration of verl's (YAML, interpolations included) and write ours. Where verl would take "
    "another default than we do, verl's is written out. What has no counterpart is listed."
)

EXIT_CODES = {
    0: "converted; what has no counterpart and what is still to be set is listed",
    2: "the file or an override cannot be read, or the file of `--out` is there already",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="configuration of verl's (YAML)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="verl's keys that its command line sets"
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
    """The YAML file; lines that verl's file does not say are marked."""
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
    """What a person has to know and to do."""
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
