"""The queue service's loops, over a ledger that answers as told."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from headrace.ledger.client import LedgerError, LedgerUnavailable, LedgerWentBack
from headrace.ledger.replies import ExpireReply, IssueReply, ValStatus, Verdict
from headrace.metrics.sync_and_eval import EVAL_ROW
from headrace.system.endings import FINAL
from headrace.v1.sample_pb2 import ValidationResult
from headrace.wire.payloads import decode_prompt
from headrace_queue.feeder import CHUNK, Feeder, next_issue
from headrace_queue.janitor import Janitor, TrainedUpTo, nested_floor, trim_floor
from headrace_queue.loops import Fatal, Pulse, is_outage, run_loop
from headrace_queue.validation import EvalFile, Score, ValidationReporter, scores
from tests.support.queue_fakes import FakeLedger, make_stats, source

# -- run_loop -----------------------------------------------------------------------------------------


class Scripted:
    """A loop whose steps raise what they are told to; the last one stops it."""

    name = "scripted"

    def __init__(self, stop: asyncio.Event, *steps: Exception | None) -> None:
        self.stop, self.steps, self.interruptions = stop, list(steps), 0

    async def step(self) -> float:
        error = self.steps.pop(0)
        if not self.steps:
            self.stop.set()
        if error is not None:
            raise error
        return 0.0

    def interrupted(self) -> None:
        self.interruptions += 1


async def test_an_outage_is_lived_through_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("headrace_queue.loops.RETRY_S", 0.0)
    stop, pulse = asyncio.Event(), Pulse()
    away = LedgerUnavailable("not reached")
    loop = Scripted(stop, None, away, OSError(errno.ENOSPC, "disk full"), None)
    async with asyncio.timeout(10):
        await run_loop(loop, pulse, stop)
    assert (loop.interruptions, pulse.errors, pulse.outage_since) == (2, 2, None)
    assert [record.getMessage() for record in caplog.records] == [
        "loop interrupted, trying again",
        "loop goes on",
    ]


async def test_a_mistake_ends_the_loop() -> None:
    stop = asyncio.Event()
    with pytest.raises(KeyError):
        await run_loop(Scripted(stop, KeyError("x"), None), Pulse(), stop)


async def test_a_ledger_that_went_back_is_fatal() -> None:
    stop = asyncio.Event()
    with pytest.raises(Fatal, match="the ledger went back") as caught:
        await run_loop(Scripted(stop, LedgerWentBack("the ledger went back"), None), Pulse(), stop)
    assert caught.value.code in FINAL


def wrapped(error: redis.ResponseError) -> LedgerError:
    """As the ledger's client raises what the server refuses."""
    try:
        try:
            raise error
        except redis.ResponseError:
            raise LedgerError(str(error)) from None
    except LedgerError as out:
        return out


def test_what_counts_as_an_outage() -> None:
    assert is_outage(LedgerUnavailable("x"))
    assert is_outage(redis.BusyLoadingError("loading"))
    assert is_outage(wrapped(redis.exceptions.OutOfMemoryError("used memory > maxmemory")))
    assert is_outage(wrapped(redis.exceptions.ReadOnlyError("replica")))
    assert is_outage(wrapped(redis.ResponseError("MISCONF Errors writing to the AOF file")))
    assert not is_outage(wrapped(redis.ResponseError("wrong number of arguments")))
    assert not is_outage(LedgerError("x"))
    assert not is_outage(ValueError("x"))


# -- feeder -------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 500), st.integers(1, 500))
def test_next_issue_keeps_to_its_bounds(ready: int, max_ready: int, cursor: int, total: int) -> None:
    cursor = min(cursor, total)
    count, last = next_issue(ready, cursor, max_ready, total)
    assert 0 <= count <= CHUNK
    assert count == 0 or ready + count <= max_ready
    assert cursor + count <= total
    assert last == (cursor + count == total)
    assert count > 0 or ready >= max_ready or cursor == total


async def test_the_feeder_issues_what_the_cursor_asks_for() -> None:
    ledger = FakeLedger(
        stats=make_stats(cursor=4, counts={"ready": 1}), issue=lambda cursor, *_: IssueReply("issued", 7)
    )
    feeder = Feeder(ledger, source(), total=7, max_ready=9)  # type: ignore[arg-type]
    await feeder.step()
    script, (cursor, end, _, *prompts) = ledger.calls[1]
    assert (script, cursor, end) == ("issue", 4, 1)
    assert [decode_prompt(raw).issue for raw in prompts] == [4, 5, 6]
    assert prompts == source().encoded(4, 3)
    assert [decode_prompt(raw).epoch for raw in prompts] == [1, 1, 2]
    assert feeder.has_fed


async def test_the_end_is_said_even_when_all_is_issued() -> None:
    """As after a crash of a release that set the end in a step of its own."""
    ledger = FakeLedger(
        stats=make_stats(cursor=7, counts={"ready": 9}), issue=lambda cursor, *_: IssueReply("issued", 7)
    )
    await Feeder(ledger, source(), total=7, max_ready=9).step()  # type: ignore[arg-type]
    assert ledger.calls[1][1][:2] == (7, 1)


async def test_a_conflict_is_no_error() -> None:
    ledger = FakeLedger(
        stats=make_stats(cursor=4, counts={"ready": 0}), issue=lambda cursor, *_: IssueReply("conflict", 6)
    )
    await Feeder(ledger, source(), total=90, max_ready=3).step()  # type: ignore[arg-type]


# -- janitor ------------------------------------------------------------------------------------------


class Clock:
    """Stands in for the janitor's and its observer's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("headrace_queue.janitor.time.monotonic", lambda: self.now)


async def observe(janitor: Janitor, clock: Clock, steps: int, each_s: float = 1.0) -> None:
    for _ in range(steps):
        clock.now += each_s
        await janitor.step()


async def test_silent_owners_expire_and_outages_expire_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    beats = {"silent": 5, "alive": 1}
    nobody = make_stats(in_flight_by_owner={}, members={})
    ledger = FakeLedger(beats=beats, stats=nobody, expire=lambda *_: ExpireReply(["0000000001"], []))
    janitor = Janitor(ledger, 10.0, None)  # type: ignore[arg-type]
    janitor._observer._clock = lambda: clock.now
    for count in range(9):
        beats["alive"] = count + 2
        await observe(janitor, clock, 1)
    janitor.interrupted()
    await observe(janitor, clock, 1, each_s=4.0)
    await observe(janitor, clock, 2, each_s=6.0)  # the process was stopped twice for longer than a hole
    assert janitor.expired_owners == 0
    for count in range(12):
        beats["alive"] = count + 100
        await observe(janitor, clock, 1)
        if janitor.expired_owners:
            break
    expired = [args[0] for script, args in ledger.calls if script == "expire"]
    assert expired == ["silent"]


async def test_an_owner_or_a_member_that_never_beat_expires_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stats = make_stats(in_flight_by_owner={"mute": 2}, members={"idle": 3})
    ledger = FakeLedger(beats={}, stats=stats, expire=lambda *_: ExpireReply([], []))
    janitor = Janitor(ledger, 3.0, None)  # type: ignore[arg-type]
    janitor._observer._clock = lambda: clock.now
    await observe(janitor, clock, 3)
    assert janitor.expired_owners == 0
    await observe(janitor, clock, 1)
    assert janitor.expired_owners == 2


async def test_who_has_beaten_since_the_reading_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ledger = FakeLedger(
        beats={"late": 4},
        stats=make_stats(in_flight_by_owner={}, members={}),
        expire=lambda *_: ExpireReply([], [], expired=False),
    )
    janitor = Janitor(ledger, 3.0, None)  # type: ignore[arg-type]
    janitor._observer._clock = lambda: clock.now
    await observe(janitor, clock, 4)
    (asked,) = [args for script, args in ledger.calls if script == "expire"]
    assert (asked[0], asked[2], janitor.expired_owners) == ("late", 4, 0)


def manifest(folder: Path, name: str, content: Any) -> None:
    (folder / name).mkdir(parents=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name / "manifest.json").write_text(text)


def test_the_oldest_checkpoint_bounds_the_trim(tmp_path: Path) -> None:
    assert trim_floor(tmp_path / "absent") is None
    (tmp_path / "step_9").mkdir()
    manifest(tmp_path, ".step_1.tmp", {"step": 1, "trained": {"0": 1}})  # still being written
    assert trim_floor(tmp_path) is None
    manifest(tmp_path, "step_4", {"step": 4, "trained": {"0": 1, "1": 2, "2": 4}})
    assert trim_floor(tmp_path) == 4
    manifest(tmp_path, "step_2", {"step": 2, "trained": ["0", "1"]})
    assert trim_floor(tmp_path) == 2
    manifest(tmp_path, "step_1", '{"step": 1, "tra')
    assert trim_floor(tmp_path) is None


def test_checkpoints_of_parted_lineages_forbid_the_trim() -> None:
    line = [TrainedUpTo(2, frozenset("ab")), TrainedUpTo(4, frozenset("abc"))]
    assert nested_floor(line) == 2
    assert nested_floor([*line, TrainedUpTo(3, frozenset("ax"))]) is None


async def test_prompts_are_trimmed_when_the_checkpoints_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    ledger = FakeLedger(beats={}, stats=make_stats(in_flight_by_owner={}), trim=3)
    janitor = Janitor(ledger, 10.0, tmp_path)  # type: ignore[arg-type]
    manifest(tmp_path, "step_2", {"step": 2, "trained": ["0"]})
    await observe(janitor, clock, 30)
    manifest(tmp_path, "step_1", {"step": 1, "trained": []})
    await observe(janitor, clock, 30)
    assert [args for script, args in ledger.calls if script == "trim"] == [(2,), (1,)]


# -- validation ---------------------------------------------------------------------------------------


def result(version: int, row: int, data_source: str, reward: float, answer: str = "") -> bytes:
    message = ValidationResult(
        version=version, row=row, data_source=data_source, reward=reward, answer=answer
    )
    return message.SerializeToString()


class Validated:
    """A ledger with results by version."""

    def __init__(self) -> None:
        self.status = ValStatus(-1, 3, 0, False)
        self.results: dict[int, list[bytes]] = {}
        self.closed: list[int] = []
        self.forgotten: list[int] = []
        self.ledger = FakeLedger(
            val_status=lambda: self.status,
            val_results=lambda version: self.results.get(version, []),
            val_close=lambda version: self.closed.append(version) or Verdict.OK,  # type: ignore[func-returns-value]
            val_forget=self.forget,
        )

    def forget(self, version: int) -> Verdict:
        self.results.pop(version, None)
        self.forgotten.append(version)
        return Verdict.OK

    def reporter(self, path: Path | None) -> ValidationReporter:
        return ValidationReporter(self.ledger, ["a", "a", "b"], EvalFile(path))  # type: ignore[arg-type]


def test_scores_count_what_is_missing() -> None:
    found = scores(3, [result(3, 0, "a", 1.0), b"\xff\xff", result(3, 2, "b", 0.5)], {"b": 1, "a": 2})
    assert found == [Score(3, "a", 1.0, 1, 1), Score(3, "b", 0.5, 1, 0)]
    assert list(asdict(found[0])) == [key.name for key in EVAL_ROW]  # what docs/metrics.md lists


def test_malformed_results_count_as_unfinished() -> None:
    good = result(3, 0, "a", 1.0)
    for bad in (
        result(3, 1, "a", float("nan")),
        result(2, 1, "a", 1.0),
        result(3, 3, "a", 1.0),
        result(3, 0, "a", 0.0),  # a second answer of the same row
    ):
        assert scores(3, [good, bad], {"b": 1, "a": 2}) == [
            Score(3, "a", 1.0, 1, 1),
            Score(3, "b", None, 0, 1),
        ]


def test_several_responses_give_mean_best_and_majority() -> None:
    """A prompt counts once all its responses are there; a tie goes to the answer that came first."""
    vote = [(0, 0.0, "7"), (1, 1.0, "5"), (2, 0.0, "7")]
    tie = [(3, 1.0, "x"), (4, 0.0, "y"), (5, 0.25, "z")]
    short = [(6, 1.0, "x")]
    found = scores(
        2, [result(2, row, "a", r, said) for row, r, said in [*short, *tie, *vote[::-1]]], {"a": 3}, 3
    )
    (score,) = found
    assert (score.n, score.unfinished, score.k) == (2, 1, 3)
    assert score.reward == pytest.approx((1.0 + 1.25) / 6)
    assert score.best == 1.0
    assert score.majority == pytest.approx((0.0 + 1.0) / 2)


async def test_a_version_is_reported_when_complete_or_closed(tmp_path: Path) -> None:
    path, run = tmp_path / "run" / "eval.jsonl", Validated()
    reporter = run.reporter(path)
    await reporter.step()
    run.status, run.results[2] = ValStatus(2, 3, 1, True), [result(2, 0, "a", 1.0)]
    await reporter.step()
    assert not path.exists()
    run.status = ValStatus(2, 3, 1, False)
    await reporter.step()
    await reporter.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    single = {"k": 1, "best": None, "majority": None}
    assert lines == [
        {"version": 2, "data_source": "a", "reward": 1.0, "n": 1, "unfinished": 1, **single},
        {"version": 2, "data_source": "b", "reward": None, "n": 0, "unfinished": 1, **single},
    ]
    assert run.closed == []
    run.status = ValStatus(5, 3, 3, True)
    run.results[5] = [result(5, row, source, 0.0) for row, source in enumerate("aab")]
    await reporter.step()
    assert run.closed == [5]
    assert [score.version for score in reporter.latest] == [5, 5]


async def test_killed_between_report_and_close_it_is_not_reported_again(tmp_path: Path) -> None:
    path, run = tmp_path / "eval.jsonl", Validated()
    run.status = ValStatus(0, 3, 3, True)
    run.results[0] = [result(0, row, source, 1.0) for row, source in enumerate("aab")]
    run.ledger.answers["val_close"] = LedgerUnavailable("killed here")
    with pytest.raises(LedgerUnavailable):
        await run.reporter(path).step()
    before = path.read_text()
    run.ledger.answers["val_close"] = lambda version: run.closed.append(version)
    await run.reporter(path).step()
    assert (path.read_text(), run.closed) == (before, [0])


async def test_overtaken_versions_are_reported_in_order(tmp_path: Path) -> None:
    path, run = tmp_path / "eval.jsonl", Validated()
    path.write_text('{"note": "kept"}\n{"version": 0, "data_source": "a", "reward": 1, "n": 1, "unf')
    run.results = {v: [result(v, 0, "a", 0.5)] for v in (1, 4)}
    run.status = ValStatus(4, 3, 1, False)
    reporter = run.reporter(path)
    await reporter.step()
    await reporter.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"note": "kept"}
    assert [line["version"] for line in lines[1:]] == [1, 1, 4, 4]
    asked = [args[0] for script, args in run.ledger.calls if script == "val_results"]
    assert asked == [0, 1, 2, 3, 4]
    assert run.forgotten == [0, 1, 2, 3], "the newest is what a status shows"


async def test_killed_between_report_and_forgetting_it_is_forgotten_later(tmp_path: Path) -> None:
    path, run = tmp_path / "eval.jsonl", Validated()
    run.status, run.results[3] = ValStatus(3, 3, 1, False), [result(3, 0, "a", 0.5)]
    await run.reporter(path).step()
    before = path.read_text()
    run.status = ValStatus(5, 3, 0, True)
    await run.reporter(path).step()
    assert 3 in run.forgotten
    assert path.read_text() == before


async def test_a_version_is_reported_once_when_the_next_one_is_validated(tmp_path: Path) -> None:
    path, run = tmp_path / "eval.jsonl", Validated()
    reporter = run.reporter(path)
    for version in (0, 2, 4):
        run.results = {v: [result(v, 0, "a", 0.5)] for v in range(0, version + 1, 2)}
        run.status = ValStatus(version, 3, 3, False)
        await reporter.step()
    versions = [json.loads(line)["version"] for line in path.read_text().splitlines()]
    assert versions == [0, 0, 2, 2, 4, 4], "two data sources, each version once"


async def test_a_report_that_cannot_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = tmp_path / "eval.jsonl", Validated()
    run.status = ValStatus(0, 3, 0, False)
    reporter = run.reporter(path)
    with monkeypatch.context() as broken:
        broken.setattr("headrace_queue.validation.os.fsync", _disk_full)
        with pytest.raises(OSError, match=r"eval\.jsonl cannot be written: No space left"):
            await reporter.step()
    await reporter.step()
    assert len(path.read_text().splitlines()) == 2


def _disk_full(_: int) -> None:
    raise OSError(errno.ENOSPC, "disk full")
