"""Events that reach the run's directory through Redis, and clocks that differ: with a real server."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect
from headrace.local.valkey_server import start_valkey
from headrace.traces import clock as trace_clock
from headrace.traces import relay as trace_relay
from headrace.traces.clock import ClockReading, aligned
from headrace.traces.reading import ProcessTrace, read
from headrace.traces.recording import Recorder
from headrace.traces.relay import Collector, Relay, collecting, stream_key
from headrace.traces.service_recorder import recorder
from tests.fast.config.test_config import changed
from tests.support.trace_runs import S, command, run_directory
from tests.waiting import until


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = start_valkey(tmp_path_factory.mktemp("valkey"), "trace-tests", None)
    yield server.url
    server.stop()


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with connect(url) as made:
        made.flushall()
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory(tmp_path)


def names(run: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for start in read(run).starts:
        found.setdefault(start.process, []).extend(e.name for e in start.events)
    return found


def sent(client: redis.Redis) -> list[tuple[bytes, dict[Any, Any]]]:
    """Entries that nobody has collected."""
    return cast(list[tuple[bytes, dict[Any, Any]]], client.xrange(stream_key("r")))


def test_events_arrive_once(client: redis.Redis, run: Path) -> None:
    """Whoever collects; also of processes of one name and number, as in restarted containers."""
    relays = [Relay(client, "r", "rollouter-a"), Relay(client, "r", "rollouter-a")]
    for number, relay in enumerate(relays):
        recorder = Recorder(relay, "rollouter-a")
        for event in range(1000):  # of several chunks
            recorder.instant(f"{number}-{event}", text="x" * 50)
        relay.send()
    assert Collector(client, "other", run).collect() == 0
    kept = sent(client)
    assert Collector(client, "r", run).collect() == len(kept) > 4
    assert client.xlen(stream_key("r")) == 0
    for _, fields in kept:  # a collector that was killed before it could say so, and another one
        client.xadd(stream_key("r"), fields)
    assert Collector(client, "r", run).collect() == len(kept)
    assert names(run) == {"rollouter-a": [f"{n}-{e}" for n in range(2) for e in range(1000)]}
    assert (read(run).torn, read(run).holes) == (0, 0)


class Unsure:
    """A client whose every other answer gets lost, of what has been done and of what has not."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._turn = itertools.cycle(("before", "after", "none"))

    def xadd(self, *words: Any, **options: Any) -> None:
        turn = next(self._turn)
        if turn == "before":
            raise redis.ConnectionError
        self._client.xadd(*words, **options)
        if turn == "after":
            raise redis.TimeoutError


def test_what_is_sent_again_is_there_once(client: redis.Redis, run: Path) -> None:
    relay = Relay(Unsure(client), "r", "coordinator")  # type: ignore[arg-type]
    recorder = Recorder(relay, "coordinator")
    for event in range(600):
        recorder.instant(f"{event}", text="x" * 50)
    failures = 0
    while failures < 100:
        try:
            relay.send()
            break
        except redis.RedisError:
            failures += 1
    assert 4 < failures < 100
    Collector(client, "r", run).collect()
    assert names(run) == {"coordinator": [f"{e}" for e in range(600)]}
    assert (read(run).torn, read(run).holes) == (0, 0)


def test_a_stream_that_nobody_collects_is_bounded(
    client: redis.Redis, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace_relay, "MAX_CHUNKS", 8)
    relay = Relay(client, "r", "rollouter-a")
    recorder = Recorder(relay, "rollouter-a")
    for event in range(3000):
        recorder.instant(f"{event}", text="x" * 50)
    relay.send()
    size = sum(len(fields[b"lines"]) for _, fields in sent(client))
    assert size <= 8 * trace_relay.CHUNK_BYTES
    Collector(client, "r", run).collect()
    (start,) = read(run).starts
    assert (start.process, start.events[-1].name, read(run).holes) == ("rollouter-a", "2999", 1)
    assert command(run) == 0
    assert "1 stretch of events never came" in capsys.readouterr().err


def test_recording_waits_for_nobody(
    client: redis.Redis, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While Redis is away events are dropped and counted, and then told."""
    monkeypatch.setattr(trace_relay, "BUFFER_BYTES", 20_000)
    monkeypatch.setattr(trace_relay, "PERIOD_S", 0.05)
    away = True
    xadd = redis.Redis.xadd

    def unreachable(self: redis.Redis, *words: Any, **options: Any) -> Any:
        if away:
            raise redis.ConnectionError("away")
        return xadd(self, *words, **options)

    monkeypatch.setattr(redis.Redis, "xadd", unreachable)
    recorder = trace_relay.relayed(_url(client), "r", "rollouter-a", 10_000)
    for event in range(1000):
        recorder.instant(f"{event}")
    away = False
    collector = Collector(client, "r", run)

    def told() -> bool:
        return collector.collect() > 0 and "dropped" in names(run)["rollouter-a"]

    until(told, "the number of what was dropped", timeout_s=30)
    recorder.close()
    (start,) = read(run).starts
    told_of = [int(e.args["events"]) for e in start.events if e.name == "dropped"]
    dropped = sum(told_of)
    # A measurement of the clock may have been among them.
    assert dropped + len(start.events) - len(told_of) in (1000, 1001)
    assert command(run) == 0
    assert f"could not send {dropped} events" in capsys.readouterr().err


def _url(client: redis.Redis) -> str:
    options = client.connection_pool.connection_kwargs
    return f"redis://:{options['password']}@{options['host']}:{options['port']}/0"


def test_what_came_over_the_network_leaves_no_other_file(client: redis.Redis, run: Path) -> None:
    for name in ("../config.yaml", "a/b.jsonl", ".jsonl", "x.jsonl\n", "/etc/x.jsonl"):
        client.xadd(stream_key("r"), {"name": name, "at": 0, "lines": b"x"})
    broken: list[dict[Any, Any]] = [{"name": "x.jsonl"}, {"name": b"\xff", "at": 0, "lines": b"x"}]
    for fields in broken:
        client.xadd(stream_key("r"), fields)
    for at in ("-1", "x", str(2**62)):
        client.xadd(stream_key("r"), {"name": "x.jsonl", "at": at, "lines": b"x"})
    assert Collector(client, "r", run).collect() == 10
    assert list((run / "trace").iterdir()) == []
    assert (run / "config.yaml").read_text() == "name: r\n"


def test_a_service_without_the_directory(
    client: redis.Redis, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `recorder` makes it in a pod; the other side is what the trainer's launcher does."""
    monkeypatch.setattr(trace_relay, "PERIOD_S", 0.05)
    monkeypatch.setenv("HEADRACE_REDIS_URL", _url(client))
    monkeypatch.delenv("HEADRACE_RUN_DIR", raising=False)
    c = RunConfig.model_validate(changed(name="r", trace__enable=True))
    relayed = recorder(c, "coordinator")
    monkeypatch.setenv("HEADRACE_RUN_DIR", str(run))
    seen = recorder(c, "trainer-0")
    with caplog.at_level(logging.WARNING), collecting(_url(client), "r", run):
        relayed.instant("a")
        seen.instant("b")

        def there() -> bool:
            found = read(run).starts  # ours writes at once
            return {s.process for s in found if s.events and s.clock} == {"coordinator", "trainer-0"}

        until(there, "events and clocks of both", timeout_s=30)
    relayed.close()
    seen.close()
    assert caplog.records == []
    assert not recorder(RunConfig.model_validate(changed()), "off").enabled


def test_a_run_on_one_machine_has_one_clock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "summary.json").write_text("{}")  # a runner has been here
    monkeypatch.setenv("HEADRACE_RUN_DIR", str(run))
    monkeypatch.setattr(trace_relay, "with_clock", lambda *_: pytest.fail("there is nothing to align"))
    c = RunConfig.model_validate(changed(trace__enable=True))
    recorder(c, "trainer-0").instant("a")
    assert names(run) == {"trainer-0": ["a"]}


def test_a_process_that_ends_sends_the_rest(client: redis.Redis, run: Path) -> None:
    code = (
        "import sys; from headrace.traces.relay import relayed\n"
        "relayed(sys.argv[1], 'r', 'rollouter-a', 100).instant('last')\n"
        "sys.exit(75)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, _url(client)], timeout=60, check=False)
    assert done.returncode == 75
    Collector(client, "r", run).collect()
    assert names(run) == {"rollouter-a": ["last"]}


# -- clocks --------------------------------------------------------------------------------------


def test_clocks_of_two_nodes_are_brought_together(
    client: redis.Redis, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is 90 s slow: what happened at the same time is there at the same time."""
    here = Recorder(run, "trainer-0")
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 90 * S)
    there = Recorder(run, "trainer-1")
    for each in (here, there):
        each.clock(trace_clock.ask(client, each.offset_ns))
    before = time.monotonic_ns()
    for each in (here, there):
        each.complete("update_actor", before, before + S)
    one, two = (s.events[0] for s in read(run).starts)
    assert abs(one.ts - two.ts) < S
    assert abs(one.end - two.end) < S
    assert command(run) == 0
    assert ", their clocks aligned to " in capsys.readouterr().out


readings = st.lists(
    st.tuples(st.integers(1, 1000), st.integers(-400, 400)), max_size=6
)  # nanoseconds since the one before, and how far the server's clock has drifted since


@given(readings, st.lists(st.integers(-500, 7000), min_size=2, max_size=10))
def test_order_stays(steps: list[tuple[int, int]], times: list[int]) -> None:
    """Slices that nest or follow each other do so after the alignment; drift is slower than time itself."""
    clock, ts, ahead = [], 0, 5000
    for since, drift in steps:
        ts, ahead = ts + since, ahead + max(-since, drift)
        clock.append(ClockReading(ts, ahead, 0))
    moved = [aligned(t, clock) for t in sorted(times)]
    assert moved == sorted(moved)
    for reading in clock:
        assert aligned(reading.ts, clock) == reading.ts + reading.ahead
    start = ProcessTrace("p", 1, times[0], clock=clock)
    start.align()
    assert start.ts == aligned(times[0], clock)
