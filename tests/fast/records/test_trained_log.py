"""The trainer's own record of what it trained, and what the audit finds in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.records.row_file import Line, read_lines
from headrace.records.trained_log import FILE, TrainedLog, TrainedPath, follow, summary_line
from tests.chaos.verdict import compare


def began(lineage: int, step: int) -> dict[str, Any]:
    return {"lineage": lineage, "from_step": step}


def step(lineage: int, number: int, *ids: str) -> dict[str, Any]:
    return {"lineage": lineage, "step": number, "ids": list(ids)}


def path_of(rows: list[dict[str, Any]]) -> TrainedPath:
    return follow(Line(0, "", row, True) for row in rows)


def test_a_start_takes_back_what_its_checkpoint_has_not(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path)
    log.began(1, 0, version=-1, run_id="r")
    log.trained(1, 1, ["a", "b"], window=0)
    log.trained(1, 2, ["c"], window=1)
    log.began(2, 1, version=0, run_id="r")
    log.trained(2, 2, ["d", "c"], window=1)
    log.ended(2, 2, version=1)
    log.close()
    path = follow(read_lines(tmp_path / FILE))
    assert path.problems == []
    assert [(s.number, s.ids) for s in path.steps] == [(1, ["a", "b"]), (2, ["d", "c"])]
    assert [(s.version, s.heard, s.ended) for s in path.starts] == [(-1, None, False), (0, 1, True)]
    assert (path.lineages, path.taken_back) == (2, 1)
    assert summary_line(path) == (
        "2 lineages, 2 steps, 4 samples trained once each (1 more were taken back with their steps)"
    )
    trained = dict.fromkeys("abcd", "trained")
    assert compare(path, trained) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([began(1, 0), step(1, 1, "a"), step(1, 2, "a")], "a: trained 2 times"),
        ([began(1, 0), step(1, 1, "a"), began(2, 1), step(2, 2, "a")], "a: trained 2 times"),
        ([began(1, 0), step(1, 1, "a"), step(1, 3, "b")], "step 3 (b) follows step 1"),
        ([began(1, 0), began(2, 0), step(1, 1, "a")], "lineage 1's, but lineage 2 is running"),
        ([began(1, 0), step(1, 1, "a"), began(2, 5)], "resumes from step 5"),
        ([began(2, 0), began(1, 0)], "lineage 1 begins after lineage 2"),
    ],
)
def test_what_must_not_be(rows: list[dict[str, Any]], told: str) -> None:
    problems = path_of(rows).problems
    assert any(told in p for p in problems), problems


def test_what_differs_from_the_ledger() -> None:
    path = path_of([began(1, 0), step(1, 1, "a", "b", "c")])
    states = {"a": "trained", "b": "queued", "d": "trained", "e": "dead"}
    assert compare(path, states) == [
        "b: trained, the ledger says queued",
        "c: trained, the ledger says it was never issued",
        "d: trained in the ledger, but in no step of the last lineage's path",
    ]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8))
def test_whatever_dies_and_goes_on_leaves_each_sample_once(walk: list[tuple[int, int]]) -> None:
    """(steps that a lineage makes, how far back the next one starts): a true account has no problems."""
    rows, at, trained = [], 0, 0
    for lineage, (steps, back) in enumerate(walk, start=1):
        at = max(0, at - back)
        rows.append(began(lineage, at))
        for number in range(at + 1, at + steps + 1):
            rows.append(step(lineage, number, str(number)))  # a step trains its own sample again
            trained += 1
        at += steps
    path = path_of(rows)
    assert path.problems == []
    assert path.ids == [str(n) for n in range(1, at + 1)]
    assert path.taken_back == trained - at
