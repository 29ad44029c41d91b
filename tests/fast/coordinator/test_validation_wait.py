"""The commit's wait for a validation: not for nobody, but for members that are only not connected yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.ledger.replies import ValStatus
from headrace_coordinator.rounds.validation import let_finish


class FakeLedger:
    """A validation of two rows whose members come back, and begin, at the third look."""

    def __init__(self, members: set[str], looks: int) -> None:
        self.members = members
        self.looks = looks
        self.closed = False

    async def run(self, op: Any) -> Any:
        match op.script:
            case "val_status":
                self.looks -= 1
                return ValStatus(0, 2, 2 if self.looks < 0 else 0, self.looks >= 0 and not self.closed)
            case "stats":
                return SimpleNamespace(members=dict.fromkeys(self.members, 1))
            case "val_close":
                self.closed = True
                return "ok"
        raise AssertionError(op.script)


async def test_members_that_the_ledger_knows_are_waited_for() -> None:
    ledger = FakeLedger({"rollouter-0-1"}, looks=3)
    await let_finish(ledger, 60.0, lambda: False)  # type: ignore[arg-type]
    assert not ledger.closed


async def test_nobody_is_not_waited_for() -> None:
    ledger = FakeLedger(set(), looks=10**6)
    await let_finish(ledger, 60.0, lambda: False)  # type: ignore[arg-type]
    assert ledger.closed


async def test_nor_is_anybody_for_longer_than_the_limit() -> None:
    ledger = FakeLedger({"rollouter-0-1"}, looks=10**6)
    await let_finish(ledger, 0.0, lambda: True)  # type: ignore[arg-type]
    assert ledger.closed
