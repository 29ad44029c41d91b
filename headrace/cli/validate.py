"""`headrace validate`: check everything without starting anything, and show what would run."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from headrace.cli import options
from headrace.config import loading
from headrace.config.loading import ConfigError
from headrace.config.modes import describe, warnings
from headrace.config.run import RunConfig
from headrace.local import assets, preflight, trial
from headrace.local.forecast import Forecast, Machines, forecast
from headrace.models.checks import Checked

EXIT_PROBLEMS = 2

DESCRIPTION = (
    "Check configuration, data, reward, model, ports and Redis without starting anything; estimate memory, "
    "GPUs and nodes; print what would run. Exits with 0, or with 2 when something is wrong."
)

EXIT_CODES = {
    0: "nothing is wrong; there may be warnings",
    2: "something is wrong; every problem is printed, with `--json` under `problems`",
}
JSON = {
    "ok": "whether there is no problem",
    "problems": "one sentence each",
    "warnings": "one sentence each",
    "demo_prepared": "whether the demo's files, if it uses a demo, existed and were checked",
    "model": "`class`, `parameters`, `eos` (token to id), `tokenizer` (its class and number of tokens) and "
    "`chat_template` (whether there is one); this, `data` and `reward` are tried when nothing else is wrong",
    "data": "by `train_files` and `val_files`: `rows`, `left_out`, `tokenised` (number checked) and "
    "`prompt_tokens` (median, longest)",
    "reward": "`rows` that it was tried on: `row` (file and line), `ground_truth`, and `scores` of "
    "the ground truth and of an empty answer",
    "plan": "`mode`, `samples_per_sync`, `max_required`, `updates`, `syncs`, `processes` in their order, "
    "`trainer_ranks` and `redis` (bundled, or external)",
    "memory": "`parameters`, `tied` (head and embedding are one), `trainer_rank` and `engine` by part, and "
    "`redis_bytes`; without GPUs `local_run_bytes` (a run on this machine) and `machine_bytes` (what it has)",
    "batches": "`per_update`, `mini_batch` and `samples_per_rank` (fewest, most) in samples, `whole_updates` "
    "and the `rest` of the data",
    "gpus": "`trainer` and `rollout`: GPUs of each, `shared` if they are the same ones; `per_node`, `nodes`, "
    "and `idle` GPUs; with `--nodes` also `nodes_given` and `rollouters_held`, which fit on them with the "
    "trainer (null: not even the trainer fits); absent if no layout is possible",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    options.configuration(parser)
    options.as_json(parser)
    parser.add_argument(
        "--gpus-per-node",
        type=options.count,
        default=8,
        metavar="N",
        help="GPUs of a node (default: %(default)s)",
    )
    parser.add_argument(
        "--nodes",
        type=options.count,
        metavar="N",
        help="available nodes: report how much of the run they hold (default: report how many it needs)",
    )
    parser.add_argument(
        "--gpu-memory",
        type=options.above_zero,
        default=80.0,
        metavar="GIB",
        help="memory of a GPU (default: %(default)g)",
    )
    parser.add_argument(
        "--timeout",
        type=options.above_zero,
        default=300.0,
        metavar="S",
        help="time limit for the checks of model, data and reward, which load the tokenizer and run the "
        "reward (default: %(default)g)",
    )


def main(args: argparse.Namespace) -> int:
    machines = Machines(args.gpus_per_node, args.gpu_memory, args.nodes)
    try:
        config = assets.absolute(loading.load(args.config, args.overrides))
    except ConfigError as error:
        if not args.json:
            raise
        print(json.dumps({"ok": False, "problems": error.lines, "warnings": []}, indent=2))
        return EXIT_PROBLEMS
    report = Findings(config, machines, args.timeout)
    if args.json:
        print(json.dumps(report.to_plain(), indent=2))
    else:
        report.print()
    return EXIT_PROBLEMS if report.problems else 0


class Findings:
    """All checks of one configuration; the constructor runs them."""

    def __init__(self, config: RunConfig, machines: Machines, timeout_s: float) -> None:
        self.ready = assets.demo_ready(config)
        self.config = assets.resolve(config) if self.ready else config
        found = preflight.examine(self.config)
        self.problems = list(found.problems)
        self.warnings = [*warnings(config), *found.warnings]
        self.forecast = forecast(self.config, machines) if self.ready else Forecast()
        self.sections: dict[str, Checked] = {}
        # The trial would only report preflight's problems again, less clearly.
        if self.ready and not self.problems:
            self.sections = trial.run(self.config, timeout_s)
        for section in self.sections.values():
            self.problems += section.problems
            self.warnings += section.warnings
        self.problems += self.forecast.problems
        self.warnings += self.forecast.warnings

    def to_plain(self) -> dict[str, Any]:
        checked = {name: section.facts for name, section in self.sections.items()}
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "warnings": self.warnings,
            "demo_prepared": self.ready,
            **checked,
            **self.forecast.facts,
        }

    def print(self) -> None:
        """Print what would run to standard output, warnings and problems to standard error."""
        print("\n".join([*describe(self.config), *self.forecast.lines, *_section_lines(self.sections)]))
        if not self.ready:
            print("demo assets: not prepared yet, so model, data and memory were not looked at")
        sys.stdout.flush()
        for text in self.warnings:
            print(f"warning: {text}", file=sys.stderr)
        for text in self.problems:
            print(text, file=sys.stderr)
        sys.stderr.flush()
        count = len(self.problems)
        told = "no problems" if not count else "1 problem" if count == 1 else f"{count} problems"
        print(f"{told}; nothing was started")


def _section_lines(sections: dict[str, Checked]) -> list[str]:
    out: list[str] = []
    model = sections.get("model", Checked()).facts
    if "eos" in model:
        ends = ", ".join(f"{token} ({number})" for token, number in model["eos"].items())
        template = "with" if model["chat_template"] else "without"
        out.append(
            f"tokenizer: {model['tokenizer']['tokens']} tokens, {template} a chat template; "
            f"answers end at {ends}"
        )
    for key, facts in sections.get("data", Checked()).facts.items():
        text = f"data.{key}: {facts['rows']} rows"
        if "prompt_tokens" in facts:
            lengths = facts["prompt_tokens"]
            text += f", prompts of {lengths['longest']} tokens at most (median {lengths['median']:g})"
            if facts["tokenised"] < facts["rows"]:
                text += f" among the first {facts['tokenised']}"
        out.append(text)
    for row in sections.get("reward", Checked()).facts.get("rows", []):
        shown = ", ".join(f"{name.replace('_', ' ')} {score:g}" for name, score in row["scores"].items())
        out.append(f"reward on {row['row']} ({row['ground_truth']!r}): {shown or 'none'}")
    return out
