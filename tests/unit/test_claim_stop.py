"""A stop of any node ends the trainer's wait for samples, on all ranks alike."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import RunConfig
from headrace.ledger.replies import ClaimStatus
from headrace_trainer import batch
from headrace_trainer.batch import Batches, Stopped
from tests.unit.test_config import GOOD

CONFIG = RunConfig.model_validate(
    {**GOOD, "trainer": {"n_gpus_per_node": 1, "nnodes": 2, "claim_timeout_s": 3.0}}
)


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
        Batches(CONFIG, ledger, ranks, 1, stopping=lambda: number == stopping).next(0)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(rank, number) for number in (0, 1)]
        ended = [future.exception(30) for future in futures]
    assert [type(error) for error in ended] == [Stopped, Stopped], ended
