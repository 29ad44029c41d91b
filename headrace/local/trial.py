"""Try the model, data and reward of a configuration without a run: `python -m headrace.local.trial`.

Reads a resolved configuration as JSON from standard input. Writes one line of JSON per section as soon as
the section is done, so a caller that times out knows how far it got. It runs in a separate process because
it imports torch, transformers and vLLM and runs the code of the model and of the reward.

The functions under "seams" make all calls into data.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from headrace.config.run import RunConfig
from headrace.connections.variables import without_secrets
from headrace.data.dataset import read_held_out, read_train
from headrace.data.problems import place
from headrace.data.prompts import Prompts, tokenize_rows
from headrace.data.rows import DataError, DataRow, DataRows
from headrace.data.tokenizer import load_tokenizer, need_template
from headrace.local import reward_probe, scratch
from headrace.models.checks import Checked, check_model
from headrace.rewards import RewardError
from headrace.service.module_command import module_command
from headrace.service.spawn import die_with

MOST_PROMPTS = 5000
"""Most prompts tokenised here, for each of training and held-out data. The queue service tokenises all of
them when it starts."""
REWARD_ROWS = 3
"""Rows on which the reward is tried."""

SECTIONS = ("model", "data", "reward")

# -- seams --------------------------------------------------------------------------------------------


def _rows(config: RunConfig) -> dict[str, DataRows]:
    """Training and held-out rows, by key. Raises DataError."""
    return {"train_files": read_train(config.data), "val_files": read_held_out(config.data)}


def _tokenizer(config: RunConfig) -> Any:
    """Raises DataError."""
    return load_tokenizer(config)


def _prompts(config: RunConfig, tokenizer: Any, rows: list[DataRow]) -> Prompts:
    """Raises DataError."""
    need_template(tokenizer, rows, config)
    return tokenize_rows(tokenizer, rows, config.data)


# -- sections -----------------------------------------------------------------------------------------


class Trial:
    """Checks the sections in order; each may use what earlier ones loaded."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._tokenizer: Any = None
        self._data: dict[str, list[DataRow]] = {}

    def model(self) -> Checked:
        try:
            self._tokenizer = _tokenizer(self._config)
        except DataError as error:
            return Checked(problems=[str(error)])
        return check_model(self._config, self._tokenizer)

    def data(self) -> Checked:
        found = Checked()
        try:
            read = _rows(self._config)
        except DataError as error:
            return Checked(problems=[f"data: {line.strip()}" for line in str(error).splitlines()])
        for key, rows in read.items():
            if not rows.rows:
                continue
            self._data[key] = rows.rows
            facts: dict[str, Any] = {"rows": len(rows.rows), "left_out": rows.skipped.total}
            found.facts[key] = facts
            if self._tokenizer is None:
                continue
            looked_at = rows.rows[:MOST_PROMPTS]
            try:
                prompts = _prompts(self._config, self._tokenizer, looked_at)
            except DataError as error:
                found.problems += [f"data.{key}: {line.strip()}" for line in str(error).splitlines()]
                continue
            lengths = [len(ids) for ids in prompts.tokens]
            facts["tokenised"] = len(looked_at)
            facts["prompt_tokens"] = {"median": statistics.median(lengths), "longest": max(lengths)}
            found.warnings += [f"data.{key}: {remark}" for remark in prompts.remarks(self._config.data)]
        return found

    def reward(self) -> Checked:
        found = Checked(facts={"rows": []})
        rows = self._data.get("train_files", [])[:REWARD_ROWS]
        try:
            tried = reward_probe.try_rows(self._config, rows)
        except RewardError as error:
            return Checked(problems=[str(error)])
        told: set[str] = set()
        told_apart = False
        for truth, empty in zip(tried[::2], tried[1::2], strict=True):
            where = place(truth.row.file, truth.row.line, truth.row.is_row)
            scores = {
                name: one.reward
                for name, one in (("ground_truth", truth), ("empty", empty))
                if one.reward is not None
            }
            for what, one in (("the ground truth", truth), ("an empty answer", empty)):
                if one.problem and one.problem not in told:
                    told.add(one.problem)
                    found.problems.append(f"reward: {where}: scoring {what}: {one.problem}; correct it")
            told_apart |= truth.reward != empty.reward
            shown = {"row": where, "ground_truth": truth.row.ground_truth[:80], "scores": scores}
            found.facts["rows"].append(shown)
        if tried and not told and not told_apart:
            found.warnings.append(
                "reward: the ground truth given as an answer scores as an empty answer does, "
                f"{tried[0].reward:g}: right if the reward wants more around it, else tells nothing"
            )
        return found


def main() -> None:
    # Standard output is for results alone, so redirect what the user's code prints to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    trial = Trial(RunConfig.model_validate_json(sys.stdin.buffer.read()))
    for name in SECTIONS:
        try:
            found: Checked = getattr(trial, name)()
        except Exception as error:  # report it and continue: the other sections are still useful
            found = Checked(problems=[f"{name}: could not be checked: {error!r}"])
        out.write(json.dumps({"section": name, **asdict(found)}) + "\n")
        out.flush()
    os._exit(0)  # do not wait for threads that the user's modules started


# -- the caller's side --------------------------------------------------------------------------------


def run(config: RunConfig, timeout_s: float) -> dict[str, Checked]:
    """Return the sections that finished within `timeout_s`, and a problem for the first that did not."""
    folder = scratch.create()
    late = False
    try:
        process = subprocess.Popen(
            module_command("headrace.local.trial"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **without_secrets(),
                "TMPDIR": str(folder.root),
                "TOKENIZERS_PARALLELISM": "false",
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
            preexec_fn=die_with(os.getpid()),
        )
        try:
            written, said = process.communicate(json.dumps(config.to_plain()), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            written, said = process.communicate()
        finally:
            process.kill()  # after Ctrl-C it would outlive us
    finally:
        folder.remove()
    sections: dict[str, Checked] = {}
    for line in written.split("\n")[:-1]:  # a truncated last line does not count
        read = json.loads(line)
        name = read.pop("section")
        sections[name] = Checked(**read)
    missing = next((name for name in SECTIONS if name not in sections), None)
    if missing is not None:
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        why = f"was not checked within {timeout_s:g} s (--timeout)" if late else f"ended the check: {last}"
        sections[missing] = Checked(problems=[f"{missing}: {why}"])
    return sections


if __name__ == "__main__":
    main()
