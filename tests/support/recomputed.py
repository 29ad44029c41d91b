"""The run log once more, from raw records alone and without the code that wrote it.

Raw are: `trained.jsonl` (which step trained which samples for which window), the samples themselves,
`sync.jsonl`, the timeline, and the ledger's records. The definitions are those of docs/metrics.md.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Row = dict[str, Any]
WAITING = ("gen_wait", "wait_prev_gen")


def rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@dataclass
class Records:
    """What a run left. `states`: the ledger's record of each sample."""

    directory: Path
    group: int
    mini: int
    waits_for_commit: bool
    states: Mapping[str, Mapping[str, str]]

    def __post_init__(self) -> None:
        self.steps = [r for r in rows(self.directory / "trained.jsonl") if "ids" in r]
        self.syncs = {r["version"]: r for r in rows(self.directory / "sync.jsonl")}
        self.samples: dict[str, Row] = {}
        for file in (self.directory / "samples").glob("*.jsonl"):
            for sample in rows(file):
                assert sample["sample_id"] not in self.samples, "trained twice"
                self.samples[sample["sample_id"]] = sample
        self.trainer = self._slices("trainer-0")
        self.rollouter = self._slices("rollouter-0")

    def _slices(self, process: str) -> list[Row]:
        (file,) = (self.directory / "trace").glob(f"{process}-*.jsonl")
        return [e for e in rows(file) if e["ph"] == "X"]


# -- counts -------------------------------------------------------------------------------------------


def oldest(trajectory: Row) -> int:
    return min(version for version, _, _ in trajectory["segments"])


def span(trajectory: Row) -> int:
    return max(version for version, _, _ in trajectory["segments"]) - oldest(trajectory)


def tokens(sample: Row) -> int:
    return sum(len(sample["prompt_ids"]) + len(t["response_ids"]) for t in sample["trajectories"])


def counts(records: Records) -> list[Row]:
    """One row per step, of all that follows from the samples and their order."""
    out: list[Row] = []
    stale_samples = stale_trajectories = optimizer_steps = 0
    before_window: dict[int, int] = {}
    for step in records.steps:
        window, samples = step["window"], [records.samples[i] for i in step["ids"]]
        assert all((s["step"], s["version"]) == (step["step"], window) for s in samples)
        assert all(len(s["trajectories"]) == records.group for s in samples)
        before_window.setdefault(window, optimizer_steps)
        every = [t for s in samples for t in s["trajectories"]]
        from_version = [min(map(oldest, s["trajectories"])) for s in samples]
        gaps = [window - v for v in from_version]
        updates = [optimizer_steps - before_window.get(v, 0) for v in from_version]
        stale_samples += sum(gap > 0 for gap in gaps)
        stale_trajectories += sum(oldest(t) < window for t in every)
        optimizer_steps += -(-len(samples) // records.mini)
        spans = [max(map(span, s["trajectories"])) for s in samples]
        rewards, lengths = [t["reward"] for t in every], [len(t["response_ids"]) for t in every]
        out.append(
            {
                "step": step["step"],
                "optimizer_steps": optimizer_steps,
                "fully_async/count/stale_samples_processed": stale_samples,
                "fully_async/count/stale_trajectory_processed": stale_trajectories,
                "staleness/version_gap/hist": {str(k): v for k, v in sorted(Counter(gaps).items())},
                "staleness/version_gap/mean": float(np.mean(gaps)),
                "staleness/version_gap/max": max(gaps),
                "staleness/update_gap/mean": float(np.mean(updates)),
                "staleness/update_gap/max": max(updates),
                "staleness/stale_sample_ratio": sum(gap > 0 for gap in gaps) / len(gaps),
                "staleness/length_order_corr": spearman([tokens(s) for s in samples]),
                "reward/mean": float(np.mean(rewards)),
                "reward/std": float(np.std(rewards)),
                "response_length/mean": float(np.mean(lengths)),
                "response_length/max": max(lengths),
                "response_length/clip_ratio": sum(t["finish"] == "length" for t in every) / len(every),
                "group/zero_std_ratio": float(
                    np.mean([len({t["reward"] for t in s["trajectories"]}) == 1 for s in samples])
                ),
                "spans": spans,
            }
        )
    partials(records, out)
    return out


def spearman(values: Sequence[float]) -> float:
    """Correlation of the values' ranks with their places; ties share their mean rank."""
    found = np.asarray(values, dtype=float)
    ranks = np.array([(found < v).sum() + ((found == v).sum() - 1) / 2 for v in found])
    if len(set(values)) < 2:
        return 0.0
    return float(np.corrcoef(ranks, np.arange(len(found)))[0, 1])


def partials(records: Records, out: list[Row]) -> None:
    """Of the window that closed last. One closes with its last step, when the next version commits."""
    shown = (0, 0.0, 0)
    spans: list[int] = []
    for number, (step, row) in enumerate(zip(records.steps, out, strict=True)):
        spans += row.pop("spans")
        window = step["window"]
        last = number + 1 == len(out) or records.steps[number + 1]["window"] > window
        if last and window + 1 in records.syncs:
            partial = sum(s > 0 for s in spans)
            shown, spans = (partial, partial / len(spans), max(spans)), []
        row["fully_async/partial/total_partial_num"] = shown[0]
        row["fully_async/partial/partial_ratio"] = shown[1]
        row["fully_async/partial/max_partial_span"] = shown[2]


# -- time ---------------------------------------------------------------------------------------------


def phases(records: Records) -> list[dict[str, int]]:
    """Nanoseconds of each phase of each step: every instant belongs to the innermost slice around it."""
    steps = sorted((e for e in records.trainer if e["name"] == "step"), key=lambda e: e["args"]["step"])
    slices = [e for e in records.trainer if e["name"] != "step"]
    out = []
    for trained, step in zip(records.steps, steps, strict=True):
        assert step["args"]["step"] == trained["step"]
        began, ended = step["ts"], step["ts"] + step["dur"]
        within = [s for s in slices if s["ts"] < ended and s["ts"] + s["dur"] > began]
        marks = sorted({began, ended, *(m for s in within for m in (s["ts"], s["ts"] + s["dur"]))})
        spent: dict[str, int] = defaultdict(int)
        for start, end in pairwise(marks):
            if began <= start and end <= ended:
                around = [s for s in within if s["ts"] <= start and end <= s["ts"] + s["dur"]]
                inner = min(around, key=lambda s: s["dur"], default=None)
                spent[inner["name"] if inner is not None else "other"] += end - start
        if (
            records.waits_for_commit
            and (sync := records.syncs.get(trained["window"] + 1))
            and "param_sync" in spent
        ):
            waited = min(spent["param_sync"], round(sync["pause_s"] * 1e9))
            spent["param_sync"] -= waited
            spent["wait_prev_gen"] += waited
        assert sum(spent.values()) == step["dur"]
        out.append(dict(spent) | {"step": step["dur"]})
    return out


def busy_s(records: Records, until: float) -> float:
    """Seconds until then in which the rollouter's engine had a request."""
    stretches = [(e["ts"], e["ts"] + e["dur"]) for e in records.rollouter if e["name"] == "busy"]
    return sum(max(0.0, min(end, until) - start) for start, end in stretches) / 1e9


def rollouter_idle(records: Records) -> dict[int, float | None]:
    """By version: share of the time since the commit before in which the engine had no request."""
    (tells,) = (e for e in records.rollouter if e["name"] == "tells")
    out: dict[int, float | None] = {}
    idle: float | None = None
    before: Mapping[str, Mapping[str, float]] | None = None
    for version, sync in sorted(records.syncs.items()):
        now = sync["rollouters"]
        for told in now.values():
            until = tells["ts"] + told["window_s"] * 1e9
            assert told["active_s"] == pytest.approx(busy_s(records, until), abs=0.02), version
        if before is not None:
            grown = {
                key: sum(t[key] - before.get(name, {key: 0.0})[key] for name, t in now.items())
                for key in ("active_s", "window_s")
            }
            if grown["window_s"] > 0:
                idle = min(1.0, max(0.0, 1.0 - grown["active_s"] / grown["window_s"]))
        out[version], before = idle, now
    return out


# -- all ----------------------------------------------------------------------------------------------


def check(records: Records) -> list[str]:
    """What the run log says differently, key by key."""
    log, wrong = rows(records.directory / "metrics.jsonl"), []
    assert len(log) == len(records.steps)
    assert {i for i, r in records.states.items() if r["state"] == "trained"} == set(records.samples)
    for step in records.steps:
        assert {records.states[i]["step"] for i in step["ids"]} == {str(step["step"])}
    idle, newest = rollouter_idle(records), -1
    for row, counted, spent in zip(log, counts(records), phases(records), strict=True):
        expected = dict(counted)
        expected["trainer/idle_ratio"] = sum(spent.get(name, 0) for name in WAITING) / spent["step"]
        heard = [v for v, s in records.syncs.items() if s["interval_s"] == row.get("sync/interval_s")]
        newest = max([newest, *heard])
        expected["rollouter/idle_ratio"] = idle[newest]
        for key, value in expected.items():
            same = value == row.get(key) if not isinstance(value, float) else abs(value - row[key]) < 1e-9
            if not same:
                wrong.append(f"step {row['step']}: {key} is {row.get(key)}, the records say {value}")
        told = {
            k.removeprefix("timing_s/"): round(v * 1e9) for k, v in row.items() if k.startswith("timing_s/")
        }
        del told["reward"]
        wrong += [
            f"step {row['step']}: {told.get(name, 0)} ns of {name}, the timeline says {spent.get(name, 0)}"
            for name in sorted({*told, *spent})
            if told.get(name, 0) != spent.get(name, 0)
        ]
        if sum(ns for name, ns in told.items() if name != "step") != told["step"]:
            wrong.append(f"step {row['step']}: its phases do not add up to it")
    return wrong


def whole_run(records: Records) -> dict[str, float | None]:
    """Idle ratios of the run: over all steps but the first of each start, by their time."""
    spent = phases(records)[1:]
    idle = [row.get("rollouter/idle_ratio") for row in rows(records.directory / "metrics.jsonl")][1:]
    known = [(value, s["step"]) for value, s in zip(idle, spent, strict=True) if value is not None]
    total, weight = sum(s["step"] for s in spent), sum(w for _, w in known)
    waited = sum(s.get(name, 0) for s in spent for name in WAITING)
    return {
        "trainer": waited / total if total else None,
        "rollouter": sum(v * w for v, w in known) / weight if weight else None,
    }
