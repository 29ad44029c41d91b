"""The trackers (`headrace.records.trackers`), fed from the run's own files by a separate process.

The trainer's rank 0 starts it (`Tracking`), passes it the configuration on its standard input, and closes
that to make it finish. If the process hangs or dies, the trainer continues. It follows `metrics.jsonl` and
`eval.jsonl`. The guarantees:

- A step has one point. A tracker that can take back points purges those of steps that a resume has undone. In
  other trackers a step keeps its first point.
- A killed process leaves no gap: each tracker's directory records what it has received, and the next start
  continues there.
- It ends within `FINISH_S` of the trainer.

The x axis is the step. A held-out score is placed at the step that was reached when the score arrived.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.run import RunConfig
from headrace.connections.variables import without_secrets
from headrace.metrics.sync_and_eval import score_names
from headrace.plugins.trackers import TRACKERS
from headrace.records.evaluations import eval_rows
from headrace.records.json_files import MetricsTail, read_json, read_rows, write_json
from headrace.records.trackers import wanted
from headrace.service.module_command import module_command
from headrace.system import logs

log = logging.getLogger("headrace.trainer.trackers")

FINISH_S = 30.0
"""Longest that the trackers may take to finish once the trainer is done, within a third of
`services.stop_timeout_s`."""
_POLL_S = 1.0
_LAST_SCORES_S = 3.0
"""How long the scores of the last version are waited for: the queue service writes them a moment after the
trainer has seen its validation end."""
_STATE = ".headrace.json"


# -- the trainer's side -----------------------------------------------------------------------------------


class Tracking:
    """The process, if the configuration asks for any tracker. Only `close` may raise or wait."""

    def __init__(self, config: RunConfig, run_dir: Path, from_step: int) -> None:
        """`from_step`: the trainer continues after this step."""
        self._process: subprocess.Popen[bytes] | None = None
        self._finish_s = min(FINISH_S, config.services.stop_timeout_s / 3)
        if not wanted(config):
            return
        metrics = run_dir / "metrics.jsonl"
        there = metrics.stat().st_size if metrics.exists() else 0
        command = module_command(
            *("headrace_trainer.records.trackers", "--run-dir", str(run_dir)),
            *("--from-step", str(from_step), "--offset", str(there), "--finish-s", str(self._finish_s)),
        )
        env = without_secrets()
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
            assert self._process.stdin is not None
            # Less than a pipe holds: this does not wait for the process. Passwords are masked.
            self._process.stdin.write(json.dumps(config.to_plain()).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            log.error("no trackers", extra={"reason": str(error)})

    def check(self) -> None:
        """Log once when the process is gone."""
        if self._process is not None and self._process.poll() is not None:
            log.error("the trackers ended; training goes on", extra={"code": self._process.returncode})
            self._process = None

    def close(self) -> None:
        """Let it finish, within its time."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(self._finish_s + 2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            log.error(
                "the trackers did not finish in time and were killed", extra={"seconds": self._finish_s}
            )


# -- the process ------------------------------------------------------------------------------------------


class Feed:
    """Feeds one tracker and remembers what it has received."""

    def __init__(self, name: str, config: RunConfig, run_dir: Path, from_step: int) -> None:
        self.name = name
        directory = run_dir / name
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / _STATE
        self._state: dict[str, Any] = {"step": 0, "scores": [], **(read_json(self._file) or {})}
        kind = TRACKERS.get(name)
        if kind.takes_back:
            self._state["step"] = min(self._state["step"], from_step)
        self._tracker = kind(config, directory, self._state, self._state["step"])
        self._save()

    def give(self, rows: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]]) -> None:
        """Send rows and held-out scores in order, skipping those already sent."""
        before = dict(self._state)
        for row in rows:
            step = row.get("step")
            if isinstance(step, int) and step > self._state["step"]:
                self._tracker.log(step, numbers(row))
                self._state["step"] = step
        known = {tuple(score) for score in self._state["scores"]}
        for score in scores:
            key = (score["version"], score["data_source"])
            if key not in known:
                self._tracker.log(self._state["step"], score_values(score))
                self._state["scores"] = [*self._state["scores"], list(key)]
        if self._state != before:
            self._tracker.flush()
            self._save()

    def _save(self) -> None:
        write_json(self._file, self._state)

    def close(self) -> None:
        self._tracker.close()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numeric values of a row of `metrics.jsonl`, under its own keys."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def score_values(score: Mapping[str, Any]) -> dict[str, float]:
    """A row of `eval.jsonl` under verl's keys: `val/SOURCE/reward/mean@k`, `best@k`, `maj@k`."""
    named = {"version": "version", "unfinished": "unfinished", **score_names(score.get("k") or 1)}
    kept = {name: score.get(key) for key, name in named.items()}
    return {f"val/{score['data_source']}/{key}": value for key, value in numbers(kept).items()}


def follow(config: RunConfig, run_dir: Path, from_step: int, offset: int, done: threading.Event) -> bool:
    """Feed the trackers until `done`. False when all have failed: a tracker that raises is then left out."""
    feeds: list[Feed] = []
    for name in wanted(config):
        try:
            feeds.append(Feed(name, config, run_dir, from_step))
        except Exception as error:  # a tracker's package may raise anything; still feed the others
            _gave_up(name, error)
    metrics = run_dir / "metrics.jsonl"
    tail = MetricsTail(metrics, offset=offset)
    rows = [row for row in read_rows(metrics, limit=offset) if _step(row) <= from_step]
    while feeds:
        last_round = done.is_set()
        if last_round:
            _await_last_scores(run_dir)
        rows += tail.new_rows()
        scores = eval_rows(run_dir / "eval.jsonl")
        for feed in list(feeds):
            try:
                feed.give(rows, scores)
                if last_round:
                    feed.close()
            except Exception as error:  # logged once; that tracker is left out from then on
                _gave_up(feed.name, error)
                feeds.remove(feed)
        if last_round:
            return bool(feeds)
        rows = []
        done.wait(_POLL_S)
    return False


def _await_last_scores(run_dir: Path) -> None:
    """Wait briefly until the newest version has scores, if earlier ones have. It may never get any."""
    deadline = time.monotonic() + _LAST_SCORES_S
    newest = max(
        (row["version"] for row in read_rows(run_dir / "sync.jsonl") if "version" in row), default=-1
    )
    while time.monotonic() < deadline:
        scored = [score["version"] for score in eval_rows(run_dir / "eval.jsonl")]
        if not scored or max(scored) >= newest:
            return
        time.sleep(0.1)


def _step(row: Mapping[str, Any]) -> float:
    step = row.get("step")
    return step if isinstance(step, int) else math.inf


def _gave_up(name: str, error: Exception) -> None:
    log.error(
        "no more goes to a tracker", extra={"tracker": name, "reason": f"{type(error).__name__}: {error}"}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Feeds the run's trackers; started by rank 0.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--from-step", type=int, required=True)
    parser.add_argument("--offset", type=int, required=True, help="bytes of earlier starts' rows")
    parser.add_argument("--finish-s", type=float, default=FINISH_S, help="seconds to finish in at the end")
    args = parser.parse_args()
    logs.setup("trackers")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of standard input is the signal to finish
    config = RunConfig.model_validate_json(sys.stdin.buffer.readline())
    done = threading.Event()

    def until_closed() -> None:
        sys.stdin.buffer.read()
        done.set()
        time.sleep(args.finish_s)
        log.error("the trackers did not finish in time", extra={"seconds": args.finish_s})
        os._exit(1)

    threading.Thread(target=until_closed, daemon=True).start()
    ok = follow(config, args.run_dir, args.from_step, args.offset, done)
    sys.stderr.flush()
    os._exit(0 if ok else 1)  # a tracker's threads and exit hooks must not delay the exit


if __name__ == "__main__":
    main()
