"""The in-memory ledger, as its page tells users to use it."""

from __future__ import annotations

import doctest

from headrace.ledger import in_memory
from headrace.ledger.in_memory import InMemoryLedger
from headrace.ledger.replies import Stats


def test_its_example_runs() -> None:
    result = doctest.testmod(in_memory)
    assert result.attempted > 10
    assert not result.failed


def test_what_no_ledger_has_done_yet() -> None:
    """What the documentation shows of a ledger without samples is what an unused one says."""
    assert Stats.empty() == InMemoryLedger().stats()
