"""`headrace data`: read, check and tokenise a configuration's data, and show the engine's input."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from headrace.cli import options

if TYPE_CHECKING:
    from headrace.config.run import RunConfig
    from headrace.data.dataset import DataSet
    from headrace.data.prompts import Prompts, Tokenizer

DESCRIPTION = (
    "Read, check and tokenise the data with the same code as a run, and print statistics. With --show N, "
    "also print the first N prompts in the order of issue, exactly as the engine gets them, token by token. "
    "Nothing is started."
)

JSON = {
    "train": "`prompts`, `by_source`, `tokens` (min, median, max), `left_out` and `cut` of the training data",
    "val": "the same for the held-out data",
    "shares": "of the training entries, if they have weights",
    "prompts": "the prompts requested with `--show`, token by token",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.configuration(parser)
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N prompts")
    parser.add_argument("--val", action="store_true", help="show held-out prompts instead")
    options.as_json(parser)


def main(args: argparse.Namespace) -> int:
    from headrace.config import loading
    from headrace.config.loading import ConfigError
    from headrace.data.dataset import prepare
    from headrace.data.problems import DataError
    from headrace.local import assets
    from headrace.local.data_progress import print_progress

    config = assets.absolute(loading.load(args.config, args.overrides))
    if not assets.demo_ready(config):
        raise ConfigError([f"{args.config}: the demo's files are not made yet: `headrace run` makes them"])
    config = assets.resolve(config)
    try:
        found = prepare(config, print_progress())
    except DataError as error:
        raise ConfigError(str(error).splitlines()) from None
    shown = list(_shown(config, found, args.show, args.val))
    if args.json:
        print(json.dumps({**_summary(config, found), "prompts": shown}, ensure_ascii=False))
        return 0
    for line in _lines(config, found):
        print(line)
    for prompt in shown:
        print("\n" + "\n".join(_prompt_lines(prompt)))
    for line in found.remarks(config.data):
        print(f"warning: {line}", file=sys.stderr)
    return 0


def _summary(config: RunConfig, found: DataSet) -> dict[str, Any]:
    def of(prompts: Prompts) -> dict[str, Any]:
        lengths = sorted(len(ids) for ids in prompts.tokens)
        too_long = Counter({config.data.overlong: prompts.too_long.total})
        return {
            "prompts": len(lengths),
            "by_source": dict(Counter(row.data_source for row in prompts.rows)),
            "tokens": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]}
            if lengths
            else None,
            "left_out": prompts.invalid.total + too_long["skip"],
            "cut": too_long["truncate_left"],
        }

    weights = config.data.train_weights
    shares = weights and [weight / sum(weights) for weight in weights]
    return {"train": of(found.train), "val": of(found.held_out), "shares": shares}


def _lines(config: RunConfig, found: DataSet) -> list[str]:
    summary, out = _summary(config, found), []
    for key, what in (("train", "training"), ("val", "held-out")):
        part = summary[key]
        if part["tokens"] is None:
            out.append(f"{what}: none")
            continue
        tokens = part["tokens"]
        sources = ", ".join(f"{name} {n:,}" for name, n in sorted(part["by_source"].items()))
        out.append(
            f"{what}: {part['prompts']:,} prompts ({sources}); tokens {tokens['min']} to {tokens['max']}, "
            f"median {tokens['median']}; left out {part['left_out']}, cut {part['cut']}"
        )
    total = config.rollout.total_rollout_steps
    epochs = total / len(found.train.rows)
    out.append(f"rollout.total_rollout_steps: {total:,} samples, {epochs:.3g} epochs")
    if summary["shares"]:
        entries = zip(config.data.train_paths, summary["shares"], found.train.sizes, strict=True)
        for path, share, size in entries:
            own = total * share / size
            out.append(f"  {share:.1%} from {path}: {size:,} prompts, {own:.3g} epochs")
    return out


def _shown(config: RunConfig, found: DataSet, number: int, held_out: bool) -> Any:
    """The first prompts, as plain data."""
    from headrace.data.problems import place

    prompts = found.held_out if held_out else found.train
    for issue in range(min(number, len(prompts.rows)) if held_out else number):
        epoch, index = (0, issue) if held_out else found.order.at(issue)
        row, ids = prompts.rows[index], [int(token) for token in prompts.tokens[index]]
        yield {
            "issue": issue,
            "epoch": epoch,
            "from": place(row.file, row.line, row.is_row),
            "data_source": row.data_source,
            "ground_truth": row.ground_truth,
            "text": _decode(found.tokenizer, ids),
            "tokens": [{"id": token, "text": _decode(found.tokenizer, [token])} for token in ids],
        }


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def _prompt_lines(prompt: dict[str, Any]) -> list[str]:
    head = f"prompt {prompt['issue']}: {prompt['from']}, {prompt['data_source']}, epoch {prompt['epoch']}"
    truth = prompt["ground_truth"]
    return [
        f"{head}, ground truth {truth if len(truth) <= 60 else truth[:57] + '...'!r}",
        *(f"  | {line}" for line in prompt["text"].split("\n")),
        f"  {len(prompt['tokens'])} tokens: "
        + " ".join(f"{token['id']}:{token['text']!r}" for token in prompt["tokens"]),
    ]
