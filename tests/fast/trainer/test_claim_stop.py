"""A stop of any node ends the trainer's wait for samples, on all ranks alike."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.run import RunConfig
from headrace.connections.net import free_port
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import STOPPING_S, LedgerUnavailable, SyncLedger
from headrace.ledger.replies import ClaimStatus
from headrace.wire.sample_checks import SampleReader
from headrace_trainer.learning import batch
from headrace_trainer.learning.batch import Batches, Stopped
from headrace_trainer.learning.window_rule import WindowRule
from tests.fast.config.test_config import GOOD

CONFIG = RunConfig.model_validate(
    {**GOOD, "trainer": {"n_gpus_per_node": 1, "nnodes": 2, "claim_timeout_s": 3.0}}
)


def batches_of(ledger: Any, ranks: Any, stopping: Callable[[], bool]) -> Batches:
    return Batches(CONFIG, ledger, ranks, 1, stopping, SampleReader(CONFIG, 96), WindowRule(CONFIG.rule))


class Meeting:
    """Two ranks as threads. A collective in which they do not both take part, in the same order, breaks."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.said: dict[int, tuple[str, Any]] = {}

    def exchange(self, rank: int, call: str, value: Any) -> list[Any]:
        self.said[rank] = (call, value)
        self.barrier.wait()
        calls, values = zip(*(self.said[r] for r in (0, 1)), strict=True)
        self.barrier.wait()
        assert len(set(calls)) == 1, calls
        return list(values)


class FakeRanks:
    world_size = 2

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self._meeting = meeting

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, value: Any) -> Any:
        return self._meeting.exchange(self.rank, "share", value)[0]

    def largest(self, value: int) -> int:
        return max(self._meeting.exchange(self.rank, "largest", value))

    def gather_all(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, "gather_all", value)


class EmptyLedger:
    def run(self, op: Any) -> Any:
        if op.script == "stats":
            return SimpleNamespace(members={"rollouter-0-1": 1}, counts={})
        return SimpleNamespace(status=ClaimStatus.WAIT, items=[])


@pytest.mark.parametrize("stopping", [0, 1])
def test_a_stop_of_any_node_is_seen_while_it_waits(monkeypatch: pytest.MonkeyPatch, stopping: int) -> None:
    monkeypatch.setattr(batch, "_MEMBERS_EVERY_S", 0.05)
    meeting = Meeting()

    def rank(number: int) -> None:
        ranks: Any = FakeRanks(number, meeting)
        ledger: Any = EmptyLedger()
        batches_of(ledger, ranks, lambda: number == stopping).next(0)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(rank, number) for number in (0, 1)]
        ended = [future.exception(30) for future in futures]
    assert [type(error) for error in ended] == [Stopped, Stopped], ended


class Clock:
    """Sleeping is what moves it; `stop_at`: seconds until a stop is asked for."""

    def __init__(self, stop_at: float) -> None:
        self.now, self._stop_at = 0.0, stop_at

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def stopping(self) -> bool:
        return self.now >= self._stop_at

    def ledger(self) -> SyncLedger:
        """Of a server that is not there."""
        client = connect(f"redis://127.0.0.1:{free_port()}", 1.0)
        return SyncLedger(client, "x", 300.0, lambda: self.now, self.sleep, self.stopping)


def test_who_is_told_to_stop_does_not_wait_for_a_server_that_went_first() -> None:
    clock = Clock(stop_at=100.0)
    ledger = clock.ledger()
    with ledger.unless_stopping():
        ledger.run(ops.stats())
    assert 100.0 <= clock.now < 103.0, "it is seen in the middle of an outage"
    before = clock.now
    with ledger.unless_stopping():
        ledger.run(ops.stats())
    assert clock.now == before, "once is enough"


def test_an_outage_that_begins_after_the_stop_may_pass() -> None:
    clock = Clock(stop_at=0.0)
    with pytest.raises(LedgerUnavailable):
        clock.ledger().run(ops.stats())
    assert clock.now == pytest.approx(STOPPING_S)


def test_without_a_stop_an_outage_is_an_error() -> None:
    clock = Clock(stop_at=1e9)
    ledger = clock.ledger()
    with pytest.raises(LedgerUnavailable), ledger.unless_stopping():
        ledger.run(ops.stats())
    assert clock.now == pytest.approx(300.0)


def test_all_ranks_stop_when_one_cannot_read_its_samples_any_more() -> None:
    """Told to stop, after its server: the other rank has its own, and waits in a collective."""
    meeting = Meeting()
    fine: Any = SimpleNamespace(run=lambda op: [], unless_stopping=contextlib.nullcontext)

    def rank(number: int) -> None:
        ranks: Any = FakeRanks(number, meeting)
        ledger = Clock(0.0).ledger() if number else fine
        batches_of(ledger, ranks, lambda: number == 1)._read([], {}, 0)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(rank, number) for number in (0, 1)]
        ended = [future.exception(30) for future in futures]
    assert [type(error) for error in ended] == [Stopped, Stopped], ended
