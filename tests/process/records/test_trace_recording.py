"""Recording a timeline: what is kept whatever happens, and that nothing disturbs the run."""

from __future__ import annotations

import asyncio
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

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.trace import merge, validate
from headrace.traces import recording
from headrace.traces.reading import read
from headrace.traces.recording import Lanes, Recorder
from tests.support.trace_runs import S, command, run_directory, slices, trace_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory(tmp_path)


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
    assert abs(recording._wall_minus_monotonic() - expected) < S // 10


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

    def record() -> None:
        for _ in range(30):
            recorder.instant("event")

    threads = [threading.Thread(target=record) for _ in range(4)]
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
        "import sys; from pathlib import Path; from headrace.traces.recording import Recorder\n"
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
        "import os, sys; from pathlib import Path; from headrace.traces.recording import Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]), 'p')\n"
        "recorder._lock.acquire()  # as if another thread were writing\n"
        "child = os.fork()\n"
        "recorder.instant('from %d' % bool(child))\n"
        "child and os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, timeout=60)
    assert [e.name for e in read(run).starts[0].events] == ["from 1"]


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
