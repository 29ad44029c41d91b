"""Collect the report's data from a run's directory. Any file may be missing, truncated, or still growing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.local.in_cluster import look
from headrace.metrics import row_keys
from headrace.records.evaluations import eval_rows
from headrace.records.json_files import read_rows
from headrace.records.layout import RunLayout
from headrace.records.sample_dump import ORDERS, Kept, Picks, read
from headrace.records.token_text import Decode

Row = Mapping[str, Any]
SAMPLES_SHOWN = 2
"""Trajectories of each kind, from different groups."""
_LOOKED_THROUGH = 64


@dataclass(frozen=True)
class Point:
    """A value and its position on both x axes."""

    step: float
    wall_s: float
    value: float


@dataclass
class RunData:
    label: str
    """Name of the run, unique on the page."""
    root: Path
    state: str
    """`running`, the summary's status, or `killed`; in a cluster the ledger's state, or `unknown`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Resolved configuration by dotted key."""
    summary: dict[str, Any] = field(default_factory=dict)
    updates: list[Row] = field(default_factory=list)
    """Rows of `metrics.jsonl` that led to the current weights, one per step."""
    syncs: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    samples: dict[str, list[Kept]] = field(default_factory=dict)
    """A few trajectories by kind: worst, best, longest, last."""
    lengths: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    """By outcome: number of samples, mean and largest number of tokens (the group's prompt and responses)."""
    decode: Decode | None = None

    # -- series -----------------------------------------------------------------------------------

    def series(self, key: str) -> list[Point]:
        """The values of a `metrics.jsonl` key. Skips rows without a finite number."""
        out = []
        for row in self.updates:
            value, at = number(row.get(key)), place(row)
            if value is not None and at is not None:
                out.append(Point(at[0], at[1], value))
        return out

    def sync_series(self, key: str) -> list[Point]:
        """The values of a `sync.jsonl` key, each where its version was first used."""
        found = ((row.get("version"), number(row.get(key))) for row in self.syncs)
        places = self._places_of_versions()
        return [
            Point(*places[version], value)
            for version, value in found
            if value is not None and version in places
        ]

    def scores(self, source: str, key: str = "reward") -> list[Point]:
        """The held-out scores of one data source."""
        places = self._places_of_versions()
        return [
            Point(*places[row["version"]], value)
            for row in self.evals
            if row["data_source"] == source
            and (value := number(row.get(key))) is not None
            and row["version"] in places
        ]

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(row["data_source"] for row in self.evals))

    def _places_of_versions(self) -> dict[int, tuple[float, float]]:
        """Step and wall clock at which each version was in use: those of the first row that has it.

        Versions committed after the last row get the last row's.
        """
        places: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
        known, last = 0, (0.0, 0.0)
        for row in self.updates:
            version, at = row.get(row_keys.FULLY_ASYNC_COUNT_CURRENT_PARAM_VERSION), place(row)
            if at is None:
                continue
            last = at
            if isinstance(version, int) and version > known:
                places.update(dict.fromkeys(range(known + 1, version + 1), at))
                known = version
        later = [row.get("version") for row in (*self.syncs, *self.evals)]
        places.update({v: last for v in later if isinstance(v, int) and v > known})
        return places


def place(row: Row) -> tuple[float, float] | None:
    """(step, wall clock) of a row of `metrics.jsonl`."""
    step, wall = number(row.get("step")), number(row.get("wall_s"))
    if step is None:
        return None
    return step, wall if wall is not None else 0.0


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def collect(layouts: Sequence[RunLayout], decoders: Sequence[Decode | None]) -> list[RunData]:
    names = labels(layouts)
    return [_collect(*args) for args in zip(layouts, names, decoders, strict=True)]


def labels(layouts: Sequence[RunLayout]) -> list[str]:
    """The directories' names, with as many parents as needed to make them unique."""
    parts = [layout.root.parts for layout in layouts]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(p[-1:])} ({i + 1})" for i, p in enumerate(parts)]


def _collect(layout: RunLayout, label: str, decode: Decode | None) -> RunData:
    summary = layout.read_summary() or {}
    if layout.in_cluster:
        state = look(layout).state
    elif layout.in_use():
        state, summary = "running", {}
    else:
        state = str(summary.get("status") or "killed")
    run = RunData(
        label,
        layout.root,
        state,
        flat(_yaml(layout.config)),
        summary,
        path_of(read_rows(layout.metrics)),
        _last_by_version(read_rows(layout.sync)),
        list(eval_rows(layout.eval)),
        decode=decode,
    )
    _read_samples(run, layout)
    return run


def _read_samples(run: RunData, layout: RunLayout) -> None:
    picks = Picks(_LOOKED_THROUGH)
    sizes: dict[tuple[str, int], int] = {}  # (sample, step) -> tokens of the group
    retried: set[tuple[str, int]] = set()
    for kept in read(layout.root, read_rows(layout.trained)):
        picks.add(kept)
        key = (kept.sample_id, kept.step)
        sizes[key] = sizes.get(key, 0) + len(kept.prompt_ids) + len(kept.response_ids)
        if kept.attempt > 1:
            retried.add(key)
    for order in ORDERS:
        distinct: dict[str, Kept] = {}
        for kept in picks.of(order):
            distinct.setdefault(kept.sample_id, kept)
        run.samples[order] = list(distinct.values())[:SAMPLES_SHOWN]
    for outcome, entry in (run.summary.get("lengths") or {}).items():
        try:
            run.lengths[outcome] = (int(entry["samples"]), float(entry["mean"]), int(entry["largest"]))
        except (KeyError, TypeError, ValueError):
            continue  # a malformed summary
    for outcome, again in (("trained at the first attempt", False), ("trained after a requeue", True)):
        found = [size for key, size in sizes.items() if (key in retried) is again]
        if found:
            run.lengths[f"{outcome}, recorded"] = (len(found), sum(found) / len(found), max(found))


def path_of(rows: Sequence[Row]) -> list[Row]:
    """Drop the rows of steps that a later start rolled back."""
    path: list[Row] = []
    for row in rows:
        step = number(row.get("step"))
        if step is None:
            continue
        while path and path[-1]["step"] >= step:
            path.pop()
        path.append(row)
    return path


def _last_by_version(rows: Sequence[Row]) -> list[Row]:
    return list({row["version"]: row for row in rows if isinstance(row.get("version"), int)}.values())


def _yaml(path: Path) -> dict[str, Any]:
    """Read the file without validation: the page of an old run must not fail on a removed key."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys."""
    out: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            out |= flat(inner, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = inner
    return out
