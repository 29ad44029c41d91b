"""A bounded record of trained samples: prompts, responses, rewards, versions. `headrace samples` reads it.

Every trainer rank appends to its own files `samples/RANK-NUMBER.jsonl` in the run's directory, one line per
sample. The samples are drawn at random, at most `dump.samples_per_update` per update over all ranks.
Guarantees:

- Together the files never hold more than `dump.max_bytes`, except for the line being written. A file that has
  reached its share is followed by a new one, and the oldest file except the very first is deleted. So the
  beginning of the run and its recent past are both kept.
- Writing never disturbs the run. A full disk ends the record with one error in the log. An update writes no
  more than 1/512 of `dump.max_bytes`, or one sample: tens of milliseconds at the default.
- A killed rank loses at most its last line. Each start begins a new file, so it never appends to a torn line.
- Reading leaves out steps that a later start took back.
"""

from __future__ import annotations

import heapq
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.records.row_file import RowFile
from headrace.system import disk
from headrace.wire.payloads import Sample, Segment, Trajectory, WireError, check_segments

log = logging.getLogger("headrace.sample_dump")

DIRECTORY = "samples"
_FILES = 16
"""Number of files into which a rank's share of `dump.max_bytes` is split."""
_UPDATES = 512
"""Number of updates whose samples must fit. With long responses each update keeps fewer, but at least one."""


class SampleDump:
    """The writer of one rank's part of the record."""

    def __init__(
        self,
        run_dir: Path,
        rank: int = 0,
        world_size: int = 1,
        *,
        samples_per_update: int,
        max_bytes: int,
        log_probs: bool = False,
    ) -> None:
        """`max_bytes` and `samples_per_update` are totals over all ranks."""
        self._directory = run_dir / DIRECTORY
        self._rank, self._world_size = rank, world_size
        more = rank < samples_per_update % world_size
        self._per_update = samples_per_update // world_size + more
        self._budget = max_bytes // world_size
        self._log_probs = log_probs
        self._file: RowFile | None = None
        self._failed = False

    def write(
        self,
        samples: Sequence[Sample],
        *,
        step: int,
        version: int,
        lineage: int,
        advantages: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Write a random selection of one local update's samples.

        `version`: of the window that trained them. `advantages`: sample id -> those of its trajectories.
        """
        if self._failed or not self._per_update or not samples:
            return
        drawn = random.Random(step).sample(samples, min(len(samples), self._per_update))
        left = self._budget // _UPDATES
        try:
            for sample in drawn:
                known = (advantages or {}).get(sample.prompt.sample_id)
                line = {
                    "step": step,
                    "version": version,
                    "lineage": lineage,
                    **sample_row(sample, known, self._log_probs),
                }
                encoded = json.dumps(line, separators=(",", ":")).encode() + b"\n"
                self._append(encoded)
                left -= len(encoded)
                if left <= 0:
                    return
        except OSError as error:
            self._failed = True
            reason = disk.full(error, self._directory) or str(error)
            log.error("no more samples are recorded", extra={"reason": reason})

    def _append(self, line: bytes) -> None:
        if self._file is not None and self._file.size + len(line) > self._budget // _FILES:
            self.close()
        if self._file is None:
            self._file = self._begin_file(len(line))
        self._file.append(line)

    def _begin_file(self, needed: int) -> RowFile:
        self._directory.mkdir(parents=True, exist_ok=True)
        numbers = [number for rank, number in map(_rank_and_number, self._mine()) if rank == self._rank]
        number = max(numbers, default=-1) + 1
        self._make_room(max(needed, self._budget // _FILES))
        return RowFile(self._directory / f"{self._rank}-{number:06d}.jsonl")

    def _make_room(self, needed: int) -> None:
        """Delete the oldest files, the first one last, until `needed` bytes fit."""
        there = sorted(self._mine(), key=lambda file: (_rank_and_number(file)[1], file.name))
        held = sum(file.stat().st_size for file in there)
        for file in [*there[1:], *there[:1]]:
            if held + needed <= self._budget:
                return
            held -= file.stat().st_size
            file.unlink()

    def _mine(self) -> list[Path]:
        """This rank's files, plus its share of those left by ranks that no longer exist."""
        return [f for f in _files(self._directory) if _rank_and_number(f)[0] % self._world_size == self._rank]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def sample_row(
    sample: Sample, advantages: Sequence[float] | None = None, log_probs: bool = False
) -> dict[str, Any]:
    """A sample as plain data. Default values (a loss mask of ones, no reward parts) are left out."""
    p = sample.prompt
    return {
        "sample_id": p.sample_id,
        "epoch": p.epoch,
        "row": p.row,
        "data_source": p.data_source,
        "ground_truth": p.ground_truth,
        "owner": sample.owner,
        "attempt": sample.attempt,
        "generate_s": round(sample.generate_s, 4),
        "reward_s": round(sample.reward_s, 4),
        "prompt_ids": p.token_ids.tolist(),
        "trajectories": [
            _trajectory_row(t, advantages[i] if advantages is not None else None, log_probs)
            for i, t in enumerate(sample.trajectories)
        ],
    }


def _trajectory_row(t: Trajectory, advantage: float | None, log_probs: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "reward": t.reward,
        "finish": t.finish_reason.name.lower(),
        "segments": [[s.version, s.start, s.end] for s in t.segments],
        "response_ids": t.token_ids.tolist(),
    }
    if advantage is not None:
        row["advantage"] = advantage
    if t.reward_parts:
        row["reward_parts"] = dict(t.reward_parts)
    if not t.loss_mask.all():
        row["loss_mask"] = t.loss_mask.tolist()
    if log_probs:
        row["log_probs"] = [round(v, 5) for v in t.log_probs.tolist()]
    return row


# -- reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """One recorded trajectory. Tokens are ids of the model's tokenizer."""

    step: int
    version: int
    """Version of the window that trained it, that is, of the weights that it updated."""
    lineage: int
    sample_id: str
    number: int
    """Index in the group."""
    data_source: str
    ground_truth: str
    owner: str
    attempt: int
    generate_s: float
    prompt_ids: list[int]
    response_ids: list[int]
    segments: list[tuple[int, int, int]]
    """(version, start, end) of each run of tokens."""
    reward: float
    finish: str
    reward_parts: dict[str, float]
    advantage: float | None
    loss_mask: list[int] | None
    """None: every token was trained."""
    log_probs: list[float] | None

    @property
    def pieces(self) -> list[tuple[int | None, int, int]]:
        """`segments`, split at the borders of untrained tokens: (version, start, end). Version is None for
        those tokens, which the environment wrote."""
        pieces: list[tuple[int | None, int, int]] = []
        for version, start, end in self.segments:
            for at in range(start, end):
                mask = self.loss_mask
                writer = None if mask is not None and at < len(mask) and not mask[at] else version
                if pieces and pieces[-1][0] == writer and pieces[-1][2] == at and at > start:
                    pieces[-1] = writer, pieces[-1][1], at + 1
                else:
                    pieces.append((writer, at, at + 1))
        return pieces

    @property
    def gap(self) -> int:
        """Version gap: the version that trained it − the oldest version in it."""
        return self.version - min((version for version, _, _ in self.segments), default=self.version)


def read(run_dir: Path, trained: Iterable[Mapping[str, Any]] = ()) -> Iterator[Kept]:
    """Read every recorded trajectory, file by file.

    `trained`: rows of `trained.jsonl`, which show the steps that were taken back. Unreadable or inconsistent
    lines are skipped.
    """
    forks = [(row["lineage"], row["from_step"]) for row in trained if "from_step" in row]
    for file in sorted(_files(run_dir / DIRECTORY), key=lambda f: (_rank_and_number(f)[1], f.name)):
        try:
            lines = file.open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue  # just deleted, to make room
        with lines:
            for line in lines:
                try:
                    row = json.loads(line)
                    found = [_kept(row, number, t) for number, t in enumerate(row["trajectories"])]
                    for kept in found:
                        _check(kept)
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                    continue
                if any(row["lineage"] < lineage and row["step"] > step for lineage, step in forks):
                    continue
                yield from found


def _kept(row: Mapping[str, Any], number: int, t: Mapping[str, Any]) -> Kept:
    return Kept(
        step=int(row["step"]),
        version=int(row["version"]),
        lineage=int(row["lineage"]),
        sample_id=str(row["sample_id"]),
        number=number,
        data_source=str(row["data_source"]),
        ground_truth=str(row["ground_truth"]),
        owner=str(row["owner"]),
        attempt=int(row["attempt"]),
        generate_s=float(row["generate_s"]),
        prompt_ids=[int(token) for token in row["prompt_ids"]],
        response_ids=[int(token) for token in t["response_ids"]],
        segments=[(int(v), int(start), int(end)) for v, start, end in t["segments"]],
        reward=float(t["reward"]),
        finish=str(t["finish"]),
        reward_parts={str(name): float(value) for name, value in (t.get("reward_parts") or {}).items()},
        advantage=None if t.get("advantage") is None else float(t["advantage"]),
        loss_mask=None if t.get("loss_mask") is None else [int(kept) for kept in t["loss_mask"]],
        log_probs=None if t.get("log_probs") is None else [float(value) for value in t["log_probs"]],
    )


def _check(kept: Kept) -> None:
    """Check the invariants that readers rely on, e.g. that no corrupt segment claims billions of tokens.

    Raises WireError.
    """
    count = len(kept.response_ids)
    check_segments([Segment(*segment) for segment in kept.segments], count)
    if any(len(array) != count for array in (kept.loss_mask, kept.log_probs) if array is not None):
        raise WireError("arrays of several lengths")


ORDERS: dict[str, Callable[[Kept], tuple[Any, ...]]] = {
    "best": lambda k: (k.reward, k.step),
    "worst": lambda k: (-k.reward, k.step),
    "longest": lambda k: (len(k.response_ids), k.step),
    "last": lambda k: (k.step, k.sample_id, k.number),
}
"""Sort keys of the selectable orders. The largest keys come first; later steps win ties."""


def pick(found: Iterable[Kept], order: str, count: int) -> list[Kept]:
    """Pick `count` trajectories: `worst` or `best` by reward, `longest` by tokens, or the `last` trained (in
    order of training)."""
    chosen = heapq.nlargest(count, found, key=ORDERS[order])
    return chosen[::-1] if order == "last" else chosen


class Picks:
    """Picks `count` trajectories for every order in one pass, because the record may not fit into memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._heaps: dict[str, list[tuple[tuple[Any, ...], int, Kept]]] = {order: [] for order in ORDERS}
        self._seen = 0

    def add(self, kept: Kept) -> None:
        self._seen += 1
        for order, heap in self._heaps.items():
            entry = (ORDERS[order](kept), self._seen, kept)  # the counter avoids comparing Kept
            if len(heap) < self._count:
                heapq.heappush(heap, entry)
            elif entry[:2] > heap[0][:2]:
                heapq.heapreplace(heap, entry)

    def of(self, order: str) -> list[Kept]:
        return [kept for _, _, kept in sorted(self._heaps[order], reverse=True, key=lambda e: e[:2])]


def _files(directory: Path) -> list[Path]:
    return [f for f in directory.glob("*-*.jsonl") if f.stem.replace("-", "", 1).isdigit()]


def _rank_and_number(file: Path) -> tuple[int, int]:
    rank, _, number = file.stem.partition("-")
    return int(rank), int(number)
