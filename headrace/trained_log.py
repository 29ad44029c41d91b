"""Which step trained which samples, as the trainer itself wrote it down: what the ledger is audited against.

`trained.jsonl` in the run's directory has a row for every start of a trainer, with the step that it went on
from and the run's id, and a row for every step. A start at step k takes back everything that was trained
after k, so the file tells the path from the first lineage to the last: what the weights have really seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.row_file import RowFile

FILE = "trained.jsonl"


class TrainedLog:
    """Written by the trainer's first rank."""

    def __init__(self, run_dir: Path) -> None:
        self._file = RowFile(run_dir / FILE)

    def began(self, lineage: int, from_step: int, run_id: str) -> None:
        self._file.write({"lineage": lineage, "from_step": from_step, "run_id": run_id})

    def trained(self, lineage: int, step: int, ids: Sequence[str]) -> None:
        self._file.write({"lineage": lineage, "step": step, "ids": list(ids)})

    def close(self) -> None:
        self._file.close()


@dataclass
class TrainedPath:
    """What the last lineage's weights have seen."""

    lineages: int = 0
    steps: list[list[str]] = field(default_factory=list)
    """Ids of step 1, 2, ..."""
    taken_back: int = 0
    """Samples of steps that a later start has taken back."""
    problems: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [sample_id for step in self.steps for sample_id in step]


def read_path(rows: Iterable[dict[str, Any]]) -> TrainedPath:
    """Follow the rows of `trained.jsonl`, in the order in which they were written."""
    path, lineage = TrainedPath(), 0
    for row in rows:
        if "from_step" in row:
            if row["lineage"] <= lineage:
                path.problems.append(f"lineage {row['lineage']} begins after lineage {lineage}")
            if row["from_step"] > len(path.steps):
                path.problems.append(
                    f"lineage {row['lineage']} goes on from step {row['from_step']}, the last that was "
                    f"trained is {len(path.steps)}"
                )
            lineage = row["lineage"]
            path.lineages += 1
            path.taken_back += sum(map(len, path.steps[row["from_step"] :]))
            del path.steps[row["from_step"] :]
            continue
        if row["lineage"] != lineage:
            path.problems.append(f"step {row['step']} is lineage {row['lineage']}'s, lineage {lineage} is on")
        elif row["step"] != len(path.steps) + 1:
            path.problems.append(f"step {row['step']} follows step {len(path.steps)}")
        path.steps.append(list(row["ids"]))
    path.problems += [
        f"{sample_id}: trained {count} times on the path of the lineages"
        for sample_id, count in Counter(path.ids).items()
        if count > 1
    ]
    return path


def summary_line(path: TrainedPath) -> str:
    """`4 lineages, 160 steps, 2560 samples trained once each (96 more were taken back with their steps)`."""
    back = f" ({path.taken_back} more were taken back with their steps)" if path.taken_back else ""
    lineages = "1 lineage" if path.lineages == 1 else f"{path.lineages} lineages"
    return f"{lineages}, {len(path.steps)} steps, {len(path.ids)} samples trained once each{back}"


def compare(path: TrainedPath, states: dict[str, str]) -> list[str]:
    """What differs between the path and the ledger (`states`: state of every issued id) of an ended run."""
    seen = set(path.ids)
    out = []
    for sample_id in sorted(seen):
        state = states.get(sample_id)
        if state != "trained":
            out.append(f"{sample_id}: trained, the ledger says {state or 'it was never issued'}")
    for sample_id, state in sorted(states.items()):
        if state == "trained" and sample_id not in seen:
            out.append(f"{sample_id}: trained in the ledger, but in no step of the last lineage's path")
    return out
