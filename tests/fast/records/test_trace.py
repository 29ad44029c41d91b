"""`headrace trace`: merging, checking and drawing recorded timelines."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.trace import merge, validate
from headrace.traces import reading
from headrace.traces.reading import NothingRecorded, ProcessTrace, TraceEvent, read
from headrace.traces.recording import Lanes, Recorder
from tests.support.trace_runs import S, command, run_directory, trace_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory(tmp_path)


def test_the_merged_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, rollouter = Recorder(run, "trainer-0"), Recorder(run, "rollouter-0")
    zero = time.monotonic_ns() - 100 * S
    lanes = Lanes(rollouter, "samples")
    for number in range(12):
        lanes.complete("sample", zero + number, zero + 20 * S, sample_id=f"s{number}")
    trainer.complete("update_actor", zero + 30 * S, zero + 31 * S + 1)
    trainer.complete("old_log_prob", zero + 30 * S, zero + 30 * S + 500)
    trainer.counter("depth", 7)
    assert command(run) == 0
    assert "of 2 processes over 100.0 s" in capsys.readouterr().out
    merged = json.loads((run / "trace.json").read_text())
    events = merged["traceEvents"]
    assert merged["displayTimeUnit"] == "ms"
    assert validate(events) == []
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rollouter-0", "trainer-0"]
    by_name = {e["name"]: e for e in events if e["ph"] in "XC"}
    update = by_name["update_actor"]
    assert names[update["pid"]] == "trainer-0"
    assert (update["dur"], update["cat"]) == (1_000_000.001, "update")
    assert update["ts"] == pytest.approx(30e6, abs=50e3), "two recorders may differ by milliseconds"
    assert min(e["ts"] for e in events if "ts" in e) == 0
    assert by_name["depth"]["args"] == {"value": 7.0}
    order = [e["name"] for e in events if e["ph"] == "X"]
    assert order.index("update_actor") < order.index("old_log_prob"), "the parent comes first"
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert sorted(tracks, key=lambda t: tracks[t]) == ["main", *(f"samples/{n}" for n in range(12))]


def test_a_compressed_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recorder(run, "p").instant("a")
    out = run.parent / "t.json.gz"
    assert command(run, "--out", str(out)) == 0
    assert str(out) in capsys.readouterr().out
    assert "a" in {e["name"] for e in json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]}
    assert not (run / "trace.json").exists()


def test_torn_lines_are_left_out_and_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One in the middle, where a process of the same number went on, and one at the end."""
    first = Recorder(run, "p")
    first.instant("a")
    first.close()
    file = trace_file(run, "p")
    file.write_bytes(file.read_bytes() + b'{"ph":"X","name":"cut')
    second = Recorder(run, "p")
    second.instant("b")
    second.close()
    file.write_bytes(file.read_bytes()[:-4])
    third = Recorder(run, "p")
    third.instant("c")
    found = read(run)
    assert found.torn == 2
    assert [[e.name for e in s.events] for s in found.starts] == [["a"], [], ["c"]]
    assert command(run) == 0
    assert "2 lines were cut short" in capsys.readouterr().err


def test_a_file_without_its_opening_line(run: Path) -> None:
    Recorder(run, "trainer-1").instant("a")
    file = trace_file(run, "trainer-1")
    opening, rest = file.read_bytes().split(b"\n", 1)
    file.write_bytes(opening[:9] + b"\n" + rest)
    (start,) = read(run).starts
    assert (start.process, start.pid, len(start.events)) == ("trainer-1", os.getpid(), 1)


def begun(process: str, pid: int, begin: int, end: int) -> ProcessTrace:
    return ProcessTrace(process, pid, begin, [TraceEvent("X", "sample", "main", begin, end - begin)])


def test_starts_of_one_process_share_a_row() -> None:
    starts = [begun("trainer-0", 7, 0, 10), begun("trainer-0", 9, 10, 20), begun("queue", 8, 0, 20)]
    events = merge(reading.Trace(starts, 0))
    assert validate(events) == []
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["trainer-0", "queue"]
    assert [e["ts"] for e in events if e["ph"] == "X"] == [0, 0, 0.01], "nanoseconds are kept"
    assert [e["args"] for e in events if e["name"] == "start" and e["pid"] == 1] == [{"pid": 7}, {"pid": 9}]


def test_processes_that_live_at_the_same_time_do_not_share_a_row() -> None:
    events = merge(reading.Trace([begun("worker", 7, 0, 10), begun("worker", 9, 5, 20)], 0))
    assert validate(events) == []
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["worker", "worker (process 9)"]


def test_overlapping_slices_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(run, "p")
    recorder.complete("first", 0, 2 * S)
    recorder.complete("second", 1 * S, 3 * S)
    assert command(run) == 0
    assert "p, track main: second from 1.000000 s to 3.000000 s overlaps first" in capsys.readouterr().err


def test_errors_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run.with_name("none")) == 2
    assert "no run 'none'" in capsys.readouterr().err
    assert command(run) == 2
    assert "`trace.enable: true` in the configuration records it" in capsys.readouterr().err
    recorder = Recorder(run, "p")
    assert command(run) == 2, "a process started and recorded nothing"
    capsys.readouterr()
    recorder.instant("a")
    assert command(run, "--out", str(run)) == 2
    assert "is a directory" in capsys.readouterr().err
    assert command(run, "--out", str(run / "gone" / "t.json")) == 1
    assert "gone/t.json: No such file or directory" in capsys.readouterr().err


# -- checking ------------------------------------------------------------------------------------


def chrome(*spans: tuple[int, int]) -> list[dict[str, Any]]:
    """Slices of one named track, in microseconds."""
    where = {"pid": 1, "tid": 1}
    names = [
        {"ph": "M", "name": f"{what}_name", **where, "args": {"name": what}} for what in ("process", "thread")
    ]
    return names + [{"ph": "X", "name": "s", **where, "ts": b, "dur": e - b} for b, e in spans]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=5))
def test_validate_finds_what_neither_nests_nor_follows(spans: list[tuple[int, int]]) -> None:
    pairs = [(begin, begin + length) for begin, length in spans]
    crossing = any(a < c < b < d for a, b in pairs for c, d in pairs)
    assert bool(validate(chrome(*pairs))) == crossing


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dur": -1}, "dur -1 is no time"),
        ({"ts": float("nan")}, "ts nan is no time"),
        ({"ts": "1"}, "ts '1' is no time"),
        ({"dur": None}, "dur missing"),
        ({"name": None}, "name missing"),
        ({"ph": "Y"}, "unknown phase 'Y'"),
        ({"tid": 2}, "process 1, track 2: has no name"),
        ({"pid": 2}, "process 2, track None: has no name"),
    ],
)
def test_validate_finds_what_is_missing(change: dict[str, Any], told: str) -> None:
    *names, event = chrome((0, 1))
    assert validate([*names, event]) == []
    event = {key: value for key, value in {**event, **change}.items() if value is not None}
    assert any(told in problem for problem in validate([*names, event]))


# -- the picture ---------------------------------------------------------------------------------


def test_the_picture(run: Path, tmp_path: Path) -> None:
    from headrace.traces.picture import draw

    zero = time.monotonic_ns() - 100 * S
    rollouter, coordinator = Recorder(run, "rollouter-0"), Recorder(run, "coordinator")
    lanes = Lanes(rollouter, "samples")
    lanes.complete("sample", zero, zero + 9 * S, partial=True)
    lanes.complete("sample", zero, zero + 2 * S)
    rollouter.complete("paused", zero + 4 * S, zero + 6 * S)
    coordinator.complete("round", zero + 4 * S, zero + 6 * S, version=3)
    coordinator.complete("commit", zero + 5 * S, zero + 6 * S)
    draw(run, tmp_path / "pictures" / "p.png", (0.0, 10.0), "Partial rollout")
    png = (tmp_path / "pictures" / "p.png").read_bytes()
    assert png[:4] == b"\x89PNG"
    assert int.from_bytes(png[16:20], "big") == 1000
    with pytest.raises(NothingRecorded, match="between 20 s and 30 s"):
        draw(run, tmp_path / "none.png", (20.0, 30.0), "")


def test_what_the_picture_shows() -> None:
    from headrace.traces import picture

    def piece(name: str, track: str, begin: int, end: int, **args: object) -> TraceEvent:
        return TraceEvent("X", name, track, begin * S, (end - begin) * S, args=args)

    rollouter = ProcessTrace("rollouter-0", 1, 0, [
        piece("sample", "samples/10", 0, 9, partial=True), piece("sample", "samples/2", 0, 2),
        piece("paused", "main", 4, 6), piece("load", "main", 5, 6), piece("let_finish", "main", 3, 4),
    ])  # fmt: skip
    coordinator = ProcessTrace("coordinator", 2, 0, [
        piece("commit", "main", 5, 6),
        piece("round", "main", 4, 7, version=3), piece("round", "main", 8, 9, version=4),
    ])  # fmt: skip
    found = reading.Trace([coordinator, rollouter, begun("trainer-0", 3, 0, 1)], 0)
    assert picture.commits(found) == [(6.0, "v3")], "a round without a commit was abandoned"
    shown = picture.rows(found)
    assert [row.label for row in shown] == ["trainer-0", "rollouter-0", "coordinator"]
    boxes = {(b.kind, b.begin): b for b in picture.boxes(shown[1], 0)}
    short, crossing = boxes["generate", 0.0], boxes[picture.CROSSING, 0.0]
    assert short.bottom < crossing.bottom, "lanes lie in order of their numbers"
    pause, load, finish = boxes["sync pause", 4.0], boxes["transfer", 5.0], boxes["wait", 3.0]
    assert load.layer > pause.layer > crossing.layer > finish.layer
    cut = [*picture.clipped([crossing], 8.0, 20.0), *picture.clipped([crossing], -1.0, 5.0)]
    assert [(b.begin, b.end) for b in cut] == [(8.0, 9.0), (0.0, 5.0)]
    assert not picture.clipped([crossing], 9.0, 20.0)
