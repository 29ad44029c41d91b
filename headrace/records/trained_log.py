"""The trainer's own log of which step trained which samples. The ledger is audited against it.

`trained.jsonl` in the run's directory has a row for every start of a trainer, with the step that it resumed
from, a row for every step, and a row for every clean end. A start at step k takes back everything that was
trained after k. The file thus records the path from the first lineage to the last: what the weights have
really seen. The file is append-only, so a missing, duplicate or garbled row means damage. The one exception
is a trainer killed while writing: it leaves a partial row, and no row of its own after that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.records.row_file import Line, RowFile

FILE = "trained.jsonl"


class TrainedLog:
    """The writer of `trained.jsonl`, in the trainer's first rank."""

    def __init__(self, run_dir: Path) -> None:
        self._file = RowFile(run_dir / FILE, durable=True)

    def began(self, lineage: int, from_step: int, *, version: int, run_id: str) -> None:
        """Record that a trainer resumes from `from_step`; `version` was committed last.

        The row also holds the number of rows before it, so that the loss of any of them shows.
        """
        rows = self._file.rows
        self._file.write(
            {"lineage": lineage, "from_step": from_step, "version": version, "rows": rows, "run_id": run_id}
        )

    def trained(
        self, lineage: int, step: int, ids: Sequence[str], *, window: int, acknowledged: bool = True
    ) -> None:
        """Record a step.

        `window`: the version that the samples were trained for. `acknowledged`: the ledger has heard of the
        step. It need not have while the run is stopping, because the checkpoint is written next.
        """
        row: dict[str, Any] = {"lineage": lineage, "step": step, "window": window, "ids": list(ids)}
        self._file.write(row if acknowledged else row | {"acknowledged": False})

    def ended(self, lineage: int, step: int, *, version: int) -> None:
        """Record a clean end after `step`; `version` is the last one whose commit the trainer heard of."""
        self._file.write({"lineage": lineage, "ended_after": step, "version": version})

    def close(self) -> None:
        self._file.close()


@dataclass
class LineageStart:
    """One lineage, as begun by a trainer's start."""

    lineage: int
    from_step: int
    version: int | None
    """Last committed version when it began; None in files of releases that did not record it."""
    line: int
    heard: int | None = None
    """After a clean end: the last version whose commit the trainer heard of."""
    ended: bool = False
    newest_window: int | None = None
    """The newest window of its steps."""


@dataclass
class Step:
    """One step on the path."""

    number: int
    lineage: int
    ids: list[str]
    line: int
    acknowledged: bool


@dataclass
class TrainedPath:
    """The training that the last lineage's weights have seen."""

    starts: list[LineageStart] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """In the order of training."""
    taken_back: int = 0
    """Number of samples in steps that a later start took back."""
    problems: list[str] = field(default_factory=list)
    cut_row: int | None = None
    """Line of the row that the last trainer was writing when it was killed."""

    @property
    def lineages(self) -> int:
        return len(self.starts)

    @property
    def last(self) -> LineageStart | None:
        return self.starts[-1] if self.starts else None

    @property
    def ids(self) -> list[str]:
        return [sample_id for step in self.steps for sample_id in step.ids]

    @property
    def step_of(self) -> dict[str, int]:
        """Sample id -> step that trained it."""
        return {sample_id: step.number for step in self.steps for sample_id in step.ids}

    @property
    def last_step(self) -> int:
        return self.steps[-1].number if self.steps else 0

    # -- reading ---------------------------------------------------------------------------------

    def _start(self, row: dict[str, Any], line: int) -> None:
        start = LineageStart(_int(row, "lineage"), _int(row, "from_step"), _version(row), line)
        if self.last is not None and start.lineage <= self.last.lineage:
            self._wrong(line, f"lineage {start.lineage} begins after lineage {self.last.lineage}")
        if isinstance(rows := row.get("rows"), int) and line and rows != line - 1:
            of = f" of lineage {self.last.lineage}" if self.last is not None else ""
            self._wrong(
                line,
                f"lineage {start.lineage} began after {rows} rows, not {line - 1}; look at those{of}",
            )
        if start.from_step > self.last_step:
            self._wrong(
                line,
                f"lineage {start.lineage} resumes from step {start.from_step}, but the last trained step is "
                f"{self.last_step}",
            )
        self.starts.append(start)
        self.taken_back += sum(len(s.ids) for s in self.steps if s.number > start.from_step)
        self.steps = [s for s in self.steps if s.number <= start.from_step]

    def _step(self, row: dict[str, Any], line: int) -> None:
        ids = row["ids"]
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise ValueError("ids")
        step = Step(_int(row, "step"), _int(row, "lineage"), ids, line, row.get("acknowledged") is not False)
        shown = f"step {step.number} ({', '.join(ids)})"
        if self.last is None or step.lineage != self.last.lineage:
            but = f"lineage {self.last.lineage} is running" if self.last else "it has no start"
            self._wrong(line, f"{shown} is lineage {step.lineage}'s, but {but}")
        elif self.last.ended:
            self._wrong(line, f"{shown} comes after the end of lineage {step.lineage}")
        elif step.number != self.last_step + 1:
            self._wrong(line, f"{shown} follows step {self.last_step}")
        self.steps.append(step)
        window = row.get("window")
        if self.last is not None and isinstance(window, int):
            self.last.newest_window = max(window, self.last.newest_window or window)

    def _end(self, row: dict[str, Any], line: int) -> None:
        lineage, step = _int(row, "lineage"), _int(row, "ended_after")
        if self.last is None or lineage != self.last.lineage or self.last.ended:
            self._wrong(line, f"lineage {lineage} ends, but is not running")
            return
        if step != self.last_step:
            self._wrong(line, f"lineage {lineage} ends after step {step}, but the last is {self.last_step}")
        self.last.ended, self.last.heard = True, _version(row)

    def _wrong(self, line: int, what: str) -> None:
        self.problems.append(f"{FILE} line {line}: {what}" if line else what)


def _int(row: dict[str, Any], name: str) -> int:
    value = row[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(name)
    return value


def _version(row: dict[str, Any]) -> int | None:
    return _int(row, "version") if "version" in row else None


def follow(lines: Iterable[Line]) -> TrainedPath:
    """Follow the lines of `trained.jsonl`, in the order in which they were written."""
    path = TrainedPath()
    cut: Line | None = None
    """A line that may be a partial row of a killed writer, provided that a start or nothing follows."""
    for line in lines:
        row = line.row
        if cut is not None and not (row is not None and "from_step" in row):
            path._wrong(cut.number, "is no row, and was not cut off by the end of its trainer")
        cut = None
        try:
            if row is None:
                raise ValueError("no object")
            if "from_step" in row:
                path._start(row, line.number)
            elif "ended_after" in row:
                path._end(row, line.number)
            else:
                path._step(row, line.number)
        except (KeyError, TypeError, ValueError):
            if row is None and _may_be_cut(line.text, path):
                cut = line
            else:
                path._wrong(line.number, f"is no row of this file: {line.text[:200]}")
    if cut is not None and cut.whole:
        path._wrong(cut.number, "is no row, and was not cut off by the end of its trainer")
    path.cut_row = cut.number if cut is not None and not cut.whole else None
    path.problems += [
        f"{sample_id}: trained {count} times on the path of the lineages"
        for sample_id, count in Counter(path.ids).items()
        if count > 1
    ]
    return path


def _may_be_cut(text: str, path: TrainedPath) -> bool:
    """Whether this is the beginning of a row that is valid here: after an end only a start is."""
    head, start = '{"lineage": ', ', "from_step": '
    if not text or text[: len(head)] != head[: len(text)] or not any(_is_object(text + r) for r in _RESTS):
        return False
    rest = text[len(head) :].lstrip("0123456789")
    return not (path.last is not None and path.last.ended) or rest[: len(start)] == start[: len(rest)]


_RESTS = (
    *('"a": 0}', 'a": 0}', '": 0}', ": 0}", " 0}", "0}", "}", '"0"]}', '0"]}', '"]}', "]}"),
    *("false}", "alse}", "lse}", "se}", "e}"),
)
"""Shortest possible completions of a row that was cut off."""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def summary_line(path: TrainedPath) -> str:
    """`4 lineages, 160 steps, 2560 samples trained once each (96 more were taken back with their steps)`."""
    back = f" ({path.taken_back} more were taken back with their steps)" if path.taken_back else ""
    lineages = "1 lineage" if path.lineages == 1 else f"{path.lineages} lineages"
    return f"{lineages}, {len(path.steps)} steps, {len(path.ids)} samples trained once each{back}"
