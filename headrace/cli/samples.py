"""`headrace samples`: show trained samples as text."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.cli import options
from headrace.cli.status import no_run
from headrace.config import loading
from headrace.config.loading import ConfigError
from headrace.records.json_files import read_rows
from headrace.records.layout import RunLayout, find_run
from headrace.records.sample_dump import DIRECTORY, Kept, pick, read
from headrace.records.token_text import Decode, decoder, shown
from headrace.system.terminal import one_line, safe

EXIT_USAGE = 2

DESCRIPTION = (
    "Show trajectories that the run has trained: prompt, response, reward, and which tokens came from which "
    "policy version. The run keeps a bounded record of them (dump.* in the configuration)."
)

EXIT_CODES = {2: "there is no such run, or it has recorded no such sample"}
JSON = {
    "step": "local update that trained it",
    "version": "of the window that trained it",
    "version_gap": "that version − the oldest one in the response",
    "lineage": "number of the trainer's start",
    "sample_id": "of the group",
    "number": "of the trajectory within the group",
    "data_source": "as in the data",
    "ground_truth": "as in the data",
    "owner": "rollouter that finished it",
    "attempt": "number of times the sample was taken",
    "generate_s": "seconds from take to finish",
    "prompt": "text",
    "response": "text, special tokens included",
    "prompt_ids": "token ids",
    "response_ids": "token ids",
    "segments": "[policy version, start, end] of each run of tokens",
    "reward": "a number",
    "reward_parts": "its parts by name",
    "advantage": "mean over the trained tokens",
    "finish": "`stop`, `length` if it was cut off, or `turn_limit` after an environment's last turn",
    "loss_mask": "0 for tokens that were not trained, the environment's; null: all were",
    "log_probs": "behaviour log-probs, with `dump.log_probs`",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    parser.add_argument("--version", type=int, metavar="V", help="only those trained in the window of V")
    parser.add_argument("--step", type=int, metavar="K", help="only those trained in step K")
    parser.add_argument("--source", metavar="NAME", help="only of this data source")
    which = parser.add_mutually_exclusive_group()
    for order, meaning in (
        ("worst", "the N lowest rewards"),
        ("best", "the N highest rewards"),
        ("longest", "the N longest responses"),
        ("last", "the N that were trained last (the default, with 8)"),
    ):
        which.add_argument(f"--{order}", type=options.count, metavar="N", help=meaning)
    parser.add_argument("--json", action="store_true", help="print JSON lines, one trajectory each")


def main(args: argparse.Namespace) -> int:
    layout = find_run(args.run, args.runs_dir)
    if layout is None:
        print(no_run(args.run, args.runs_dir), file=sys.stderr)
        return EXIT_USAGE
    orders = ("worst", "best", "longest", "last")
    order = next((name for name in orders if getattr(args, name) is not None), "last")
    found = (
        kept
        for kept in read(layout.root, read_rows(layout.trained))
        if args.version in (None, kept.version)
        and args.step in (None, kept.step)
        and args.source in (None, kept.data_source)
    )
    chosen = pick(found, order, getattr(args, order) or 8)
    if not chosen:
        print(f"headrace: {_why_none(layout, args)}", file=sys.stderr)
        return EXIT_USAGE
    decode = decoder_of(layout)
    if decode is None:
        print("warning: the model's tokenizer is not there any more; token ids are shown", file=sys.stderr)
    for kept in chosen:
        print(json.dumps(as_json(kept, decode)) if args.json else "\n".join(as_text(kept, decode)))
    return 0


def _why_none(layout: RunLayout, args: argparse.Namespace) -> str:
    there = sorted({kept.version for kept in read(layout.root, read_rows(layout.trained))})
    if there:
        return (
            f"no recorded sample of {layout.root.name} is like that; the record has those of versions "
            f"{there[0]} to {there[-1]}"
        )
    return (
        f"{layout.root / DIRECTORY}: no samples are recorded; either nothing was trained yet, or dump.enable "
        "is false in the configuration"
    )


def decoder_of(layout: RunLayout) -> Decode | None:
    """A decoder with the tokenizer of the run's model, or with the copy in the exported model."""
    directories, trust = [layout.final], False
    try:
        model = loading.load(layout.config).model
    except (ConfigError, OSError):
        pass
    else:
        directories, trust = [Path(model.path), layout.final], model.trust_remote_code
    return decoder(directories, trust)


def as_json(kept: Kept, decode: Decode | None) -> dict[str, Any]:
    """The whole record of a trajectory, as tokens and as text."""
    return {
        **asdict(kept),
        "version_gap": kept.gap,
        "prompt": shown(kept.prompt_ids, decode),
        "response": shown(kept.response_ids, decode),
    }


def as_text(kept: Kept, decode: Decode | None) -> Iterator[str]:
    """The trajectory as lines of text."""
    advantage = "" if kept.advantage is None else f", advantage {kept.advantage:+.3f}"
    parts = "".join(f", {one_line(name)} {value:.3f}" for name, value in kept.reward_parts.items())
    yield (
        f"── sample {one_line(kept.sample_id)} #{kept.number}, {one_line(kept.data_source)}: "
        f"reward {kept.reward:.3f}{parts}{advantage}"
    )
    yield (
        f"   step {kept.step}, window of version {kept.version}, version gap {kept.gap}, "
        f"{len(kept.response_ids)} tokens, ended by {one_line(kept.finish)}, {kept.generate_s:.2f} s, "
        f"attempt {kept.attempt} by {one_line(kept.owner)}"
    )
    yield from _indented("prompt", shown(kept.prompt_ids, decode))
    for version, start, end in kept.pieces:
        label = "env" if version is None else f"v{version}"
        yield from _indented(label, shown(kept.response_ids[start:end], decode))
    if kept.ground_truth:
        yield from _indented("truth", kept.ground_truth)


def _indented(label: str, text: str) -> Iterator[str]:
    for number, line in enumerate(safe(text).split("\n")):
        yield f"   {label if number == 0 else '':<7} {line}"
