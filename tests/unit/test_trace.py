"""The timeline: what a process records survives crashes and full disks, and merges into a valid file."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import trace
from headrace.cli.main import main
from headrace.cli.trace import merge, validate
from headrace.trace import Event, Lanes, NothingRecorded, Recorder, Start, read

S = 10**9


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory, as `headrace` knows one."""
    root = tmp_path / "runs" / "r"
    root.mkdir(parents=True)
    (root / "config.yaml").write_text("name: r\n")
    return root


def trace_file(run: Path, process: str) -> Path:
    return run / "trace" / f"{process}-{os.getpid()}.jsonl"


def command(run: Path, *arguments: str) -> int:
    """`headrace trace r`; the exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["trace", run.name, "--runs-dir", str(run.parent), *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def slices(run: Path) -> list[Event]:
    return [e for s in read(run).starts for e in s.events if e.ph == "X"]


# -- recording -----------------------------------------------------------------------------------


def test_what_is_recorded(run: Path) -> None:
    recorder = Recorder(run, "trainer-0")
    with recorder.slice("update_actor", step=3) as args:
        args["tokens"] = 70
    now = time.monotonic_ns()
    recorder.complete("gen_wait", now - 2 * S, now, "waits", batch=8)
    recorder.instant("resume", version=4)
    recorder.counter("queue/depth", 12)
    (start,) = read(run).starts
    assert (start.process, start.pid) == ("trainer-0", os.getpid())
    update, wait, instant, counter = start.events
    assert (update.ph, update.name, update.track) == ("X", "update_actor", "main")
    assert update.args == {"step": 3, "tokens": 70}
    assert (wait.track, wait.dur, wait.args) == ("waits", 2 * S, {"batch": 8})
    assert (instant.ph, instant.args) == ("i", {"version": 4})
    assert (counter.ph, counter.value) == ("C", 12.0)
    assert abs(time.time_ns() - wait.end) < 60 * S, "times are those of the wall clock"


def test_an_exception_passes_and_is_noted(run: Path) -> None:
    recorder = Recorder(run, "p")
    with pytest.raises(TimeoutError), recorder.slice("transfer"):
        raise TimeoutError
    with pytest.raises(KeyError), Lanes(recorder, "samples").slice("sample"):
        raise KeyError
    assert [e.args for e in slices(run)] == [{"error": "TimeoutError"}, {"error": "KeyError"}]


def test_without_a_directory_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(None, "p")
    with recorder.slice("a") as args, Lanes(recorder, "g").slice("b") as more:
        args["x"] = more["y"] = 1
    recorder.complete("c", 0, 1)
    recorder.instant("d")
    recorder.counter("e", 1.0)
    recorder.close()
    assert not recorder.enabled
    assert not list(tmp_path.iterdir())


def test_a_clock_that_is_set_tears_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(run, "p")
    recorder.instant("before")
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    recorder.instant("after")
    before, after = read(run).starts[0].events
    assert 0 <= after.ts - before.ts < 60 * S


def test_processes_line_up_although_a_start_is_interrupted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two clocks are read a second apart at first: another reading has to be used."""
    wall, delays = time.time_ns, [S, S, 0, S, S]
    lost = 0

    def slow() -> int:
        nonlocal lost
        lost += delays.pop(0) if delays else 0
        return wall()

    real = time.monotonic_ns
    monkeypatch.setattr(time, "time_ns", slow)
    monkeypatch.setattr(time, "monotonic_ns", lambda: real() + lost)
    expected = wall() - real() - 2 * S  # when the third reading was taken
    assert abs(trace._wall_minus_monotonic() - expected) < S // 10


@pytest.mark.parametrize("value", [float("nan"), object(), {(1, 2): 3}, {"a": [float("inf")]}])
def test_any_argument_can_be_recorded(run: Path, value: object) -> None:
    recorder = Recorder(run, "p")
    recorder.instant("odd", value=value)
    recorder.counter("loss", float("nan"))
    line = trace_file(run, "p").read_text().splitlines()[-1]
    json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert read(run).starts[0].events[0].name == "odd"


def test_an_end_before_the_start_is_no_negative_time(run: Path) -> None:
    Recorder(run, "p").complete("a", 2 * S, 1 * S)
    assert slices(run)[0].dur == 0


def test_threads_share_a_recorder(run: Path) -> None:
    recorder = Recorder(run, "p", max_events=900)
    lanes = Lanes(recorder, "samples")

    def work(number: int) -> None:
        for index in range(100):
            with lanes.slice("sample", number=number, index=index):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(run)
    assert found.torn == 0
    assert {(e.args["number"], e.args["index"]) for e in slices(run)} == {
        (n, i) for n in range(8) for i in range(100)
    }
    assert validate(merge(found)) == []


def test_lines_stay_whole_when_writes_are_short(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def short(file: int, data: bytes) -> int:
        time.sleep(0)  # lets another thread go ahead
        return write(file, data[:9])

    monkeypatch.setattr(os, "write", short)
    recorder = Recorder(run, "p")
    threads = [
        threading.Thread(target=lambda: [recorder.instant("event") for _ in range(30)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(run)
    assert (found.torn, len(found.starts[0].events)) == (0, 120)


def test_a_full_file_ends_with_a_mark(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(run, "p", max_events=3)
    for number in range(10):
        recorder.instant(f"e{number}")
    assert [e.name for e in read(run).starts[0].events] == ["e0", "e1", "e2", "truncated"]
    assert not recorder.enabled
    assert command(run) == 0
    assert "stopped recording after 3 events" in capsys.readouterr().err


def test_a_full_disk_ends_the_recording_with_one_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(run, "p")
    recorder.instant("a")
    os.dup2(full := os.open("/dev/full", os.O_WRONLY), recorder._file)
    os.close(full)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with recorder.slice("b"):
                recorder.counter("c", 1)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.records[0].error  # type: ignore[attr-defined]
    assert not recorder.enabled


def test_a_directory_that_cannot_be_made_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("a file")
    recorder = Recorder(tmp_path / "run", "p")
    recorder.instant("a")
    assert len(caplog.records) == 1
    assert not recorder.enabled


def test_a_directory_that_goes_away_disturbs_nobody(run: Path) -> None:
    recorder = Recorder(run, "p")
    shutil.rmtree(run)
    with recorder.slice("a"):
        recorder.instant("b")
    recorder.close()
    assert not run.exists()


def test_a_killed_process_loses_at_most_its_last_line(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from headrace.trace import Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]), 'p')\n"
        "for n in range(10**9):\n"
        "    recorder.instant('e', n=n)\n"
        "    print(n, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(50)]
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
    found = [e.args["n"] for e in read(run).starts[0].events]
    told = [int(line) for line in said if line.endswith("\n")]
    assert found == list(range(len(found)))
    assert len(found) >= len(told) >= 50


def test_a_forked_child_records_nothing(run: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from headrace.trace import Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]), 'p')\n"
        "recorder._lock.acquire()  # as if another thread were writing\n"
        "child = os.fork()\n"
        "recorder.instant('from %d' % bool(child))\n"
        "child and os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, timeout=60)
    assert [e.name for e in read(run).starts[0].events] == ["from 1"]


# -- lanes ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=30))
def test_lanes_never_overlap(spans: list[tuple[int, int]]) -> None:
    """In whatever order the intervals are told."""
    lanes = Lanes(Recorder(None, "p"), "g")
    taken: dict[int, list[tuple[int, int]]] = {}
    for start, length in spans:
        mine = taken.setdefault(lanes.take(start, start + length), [])
        assert all(end <= start or start + length <= begin for begin, end in mine)
        mine.append((start, start + length))


async def test_concurrent_tasks_get_the_lowest_free_lane(run: Path) -> None:
    recorder = Recorder(run, "rollouter-0")
    lanes = Lanes(recorder, "samples")
    gates = {name: asyncio.Event() for name in "abc"}

    async def sample(name: str) -> None:
        with lanes.slice("sample", sample_id=name):
            await gates[name].wait()

    first, second = asyncio.create_task(sample("a")), asyncio.create_task(sample("b"))
    await asyncio.sleep(0)
    gates["a"].set()
    await first
    third = asyncio.create_task(sample("c"))
    await asyncio.sleep(0)
    gates["b"].set()
    gates["c"].set()
    await asyncio.gather(second, third)
    assert {e.args["sample_id"]: e.track for e in slices(run)} == {
        "a": "samples/0", "b": "samples/1", "c": "samples/0",
    }  # fmt: skip
    assert validate(merge(read(run))) == []


# -- merging -------------------------------------------------------------------------------------


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


def begun(process: str, pid: int, begin: int, end: int) -> Start:
    return Start(process, pid, begin, [Event("X", "sample", "main", begin, end - begin)])


def test_starts_of_one_process_share_a_row() -> None:
    starts = [begun("trainer-0", 7, 0, 10), begun("trainer-0", 9, 10, 20), begun("queue", 8, 0, 20)]
    events = merge(trace.Trace(starts, 0))
    assert validate(events) == []
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["trainer-0", "queue"]
    assert [e["ts"] for e in events if e["ph"] == "X"] == [0, 0, 0.01], "nanoseconds are kept"
    assert [e["args"] for e in events if e["name"] == "start" and e["pid"] == 1] == [{"pid": 7}, {"pid": 9}]


def test_processes_that_live_at_the_same_time_do_not_share_a_row() -> None:
    events = merge(trace.Trace([begun("worker", 7, 0, 10), begun("worker", 9, 5, 20)], 0))
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
    from headrace.trace_picture import draw

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
    from headrace import trace_picture as picture

    def piece(name: str, track: str, begin: int, end: int, **args: object) -> Event:
        return Event("X", name, track, begin * S, (end - begin) * S, args=args)

    rollouter = Start("rollouter-0", 1, 0, [
        piece("sample", "samples/10", 0, 9, partial=True), piece("sample", "samples/2", 0, 2),
        piece("paused", "main", 4, 6), piece("load", "main", 5, 6), piece("let_finish", "main", 3, 4),
    ])  # fmt: skip
    coordinator = Start("coordinator", 2, 0, [
        piece("commit", "main", 5, 6),
        piece("round", "main", 4, 7, version=3), piece("round", "main", 8, 9, version=4),
    ])  # fmt: skip
    found = trace.Trace([coordinator, rollouter, begun("trainer-0", 3, 0, 1)], 0)
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
