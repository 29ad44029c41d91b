"""Validation reporter: one row per data source and policy version in the run's `eval.jsonl`.

Guarantees:

- The rows of a version are written once and atomically, even if the service is killed at any instant. The
  file is replaced, never appended to, and its content decides what counts as reported.
- They are written when no more results can come: every held-out prompt has one, or the version was closed.
  Prompts without a result are counted as `unfinished`, never left out.
- Only then is the version closed, so a commit that waits for it finds the report written.
- A version that was closed and overtaken by a later one before this loop saw it is reported afterwards.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.system import disk
from headrace.v1.sample_pb2 import ValidationResult
from headrace.wire.payloads import WireError
from headrace.wire.sample_checks import validation_result

log = logging.getLogger(__name__)

POLL_S = 0.5


@dataclass(frozen=True)
class Score:
    """The scores of one version on one data source: a line of `eval.jsonl`."""

    version: int
    data_source: str
    reward: float | None
    """mean@k over the prompts with a result; None if there are none."""
    n: int
    """Prompts with a result."""
    unfinished: int
    """Prompts without one, or with fewer than k responses."""
    k: int = 1
    """Responses per prompt."""
    best: float | None = None
    """best@k, where k > 1: mean over the prompts of the best response's reward."""
    majority: float | None = None
    """maj@k, where k > 1: mean over the prompts of the most frequent answer's reward; the first of a tie."""


def scores(version: int, results: Sequence[bytes], held_out: Mapping[str, int], k: int = 1) -> list[Score]:
    """The scores of `version`, sorted by data source. `held_out` counts the prompts of each source."""
    by_prompt: defaultdict[tuple[str, int], list[ValidationResult]] = defaultdict(list)
    by_row: dict[int, ValidationResult] = {}
    for raw in results:
        try:
            result = validation_result(raw, version, sum(held_out.values()) * k)
            if result.row in by_row:
                raise WireError(f"a second result of row {result.row}")
        except WireError as error:
            context = {"version": version, "reason": str(error)}
            log.error("malformed validation result: it counts as unfinished", extra=context)
            continue
        by_row[result.row] = result
    for result in by_row.values():
        by_prompt[result.data_source, result.row // k].append(result)
    out = []
    for source, total in sorted(held_out.items()):
        found = [r for (of, _), r in by_prompt.items() if of == source and len(r) == k]
        several = k > 1 and bool(found)
        out.append(
            Score(
                version,
                source,
                _mean([r.reward for responses in found for r in responses]),
                len(found),
                total - len(found),
                k,
                _mean([max(r.reward for r in responses) for responses in found]) if several else None,
                _mean([_majority(responses) for responses in found]) if several else None,
            )
        )
    return out


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _majority(responses: Sequence[ValidationResult]) -> float:
    """Reward of the most frequent answer."""
    in_order = sorted(responses, key=lambda r: r.row)
    (answer, _), *_ = Counter(r.answer for r in in_order).most_common()
    return float(next(r.reward for r in in_order if r.answer == answer))


class EvalFile:
    """A run's `eval.jsonl`. Without a path the scores are only kept in memory and logged.

    Lines that are not ours are preserved. An unterminated last line is a torn write by another program and is
    dropped.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_bytes().splitlines(keepends=True) if path is not None and path.exists() else []
        self._lines = [line for line in lines if line.endswith(b"\n")]
        self._scores = [score for line in self._lines if (score := _score_of(line)) is not None]

    def __contains__(self, version: int) -> bool:
        return any(score.version == version for score in self._scores)

    @property
    def newest(self) -> int:
        """The newest reported version; -1 before the first."""
        return max((score.version for score in self._scores), default=-1)

    @property
    def latest(self) -> list[Score]:
        """The scores of the newest reported version."""
        newest = self.newest
        return [score for score in self._scores if score.version == newest]

    def add(self, scores: Sequence[Score]) -> None:
        """Write the scores of one version, durably and atomically."""
        lines = [json.dumps(asdict(score)).encode() + b"\n" for score in scores]
        if self._path is not None:
            _replace(self._path, b"".join(self._lines + lines))
        self._lines += lines
        self._scores += scores


def _score_of(line: bytes) -> Score | None:
    """Parse a line; None if it is not a score."""
    try:
        value = json.loads(line)
        return Score(**value) if isinstance(value["version"], int) else None
    except (ValueError, TypeError, KeyError):
        return None


def _replace(path: Path, content: bytes) -> None:
    """Replace the file at `path` atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".new")
    with disk.writing(path, len(content)), partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class ValidationReporter:
    """The reporter's loop. `data_sources` names the source of every held-out row."""

    name = "validation"

    def __init__(
        self, ledger: AsyncLedger, data_sources: Iterable[str], file: EvalFile, responses: int = 1
    ) -> None:
        self._ledger = ledger
        self._responses = responses
        self._held_out = Counter(data_sources)
        self._file = file
        self._next = max(0, file.newest)
        """All versions below this one are reported, and their results are deleted from the ledger."""

    @property
    def latest(self) -> list[Score]:
        return self._file.latest

    async def step(self) -> float:
        status = await self._ledger.run(ops.val_status())
        if status.version < 0:
            return POLL_S
        while self._next < status.version:
            if self._next not in self._file:
                await self._report_overtaken(self._next)
            await self._ledger.run(ops.val_forget(self._next))
            self._next += 1
        finished = status.done >= status.total or not status.open
        if finished and status.version not in self._file:
            results = await self._ledger.run(ops.val_results(status.version))
            self._report(status.version, results)
        if finished and status.open:
            await self._ledger.run(ops.val_close(status.version))
        return POLL_S

    def interrupted(self) -> None:
        """Nothing to do: no state between steps can become stale in an outage."""

    async def _report_overtaken(self, version: int) -> None:
        """Report an earlier version, if it was validated at all (few are) and has results."""
        results = await self._ledger.run(ops.val_results(version))
        if results:
            self._report(version, results)

    def _report(self, version: int, results: Sequence[bytes]) -> None:
        reached = scores(version, results, self._held_out, self._responses)
        self._file.add(reached)
        for score in reached:
            log.info("validation", extra=asdict(score))
