"""Runs that lose samples in every window come to their end, and gates that lose credit do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.config.staleness import StalenessRule
from headrace.ledger.in_memory import InMemoryLedger
from headrace.ledger.in_memory_samples import SUSPECT
from headrace.ledger.states import State
from tests.process.ledger.lockstep import LockStep

Make = Callable[[], LockStep]


class WeakGate(InMemoryLedger):
    """A counter beside the ledger: it counts starts and is set back at each commit. It leaks."""

    started = 0

    def take(self, owner: str, version: int, count: int, request: str, oldest: int = -1) -> Any:
        limit, self.max_required = self.max_required, 10**9
        reply = super().take(owner, version, min(count, limit - self.started), request, oldest)
        self.max_required = limit
        self.started += len(reply.items)
        return reply

    def commit(self, *args: Any, **kwargs: Any) -> Any:
        reply = super().commit(*args, **kwargs)
        self.started = reply.training + sum(self.stats().counts[s] for s in ("in_flight", "parked", "queued"))
        return reply


class ModelOnly:
    """The face of LockStep over a model alone."""

    def __init__(self, model: InMemoryLedger) -> None:
        self.model = model
        self.requests = 0

    def request(self) -> str:
        self.requests += 1
        return f"q{self.requests}"

    def __call__(self, name: str, *args: Any) -> Any:
        return getattr(self.model, name)(*args)

    start, sync, issue, take = LockStep.start, LockStep.sync, LockStep.issue, LockStep.take
    finish, claim = LockStep.finish, LockStep.claim


def drive_to_done(pair: Any, rule: StalenessRule, total: int) -> int:
    """One dead, one reclaimed and one dropped sample in every window; returns the policy versions made.

    Fails when nothing moves any more: the deadlock of gates that lose credit.
    """
    size = rule.require_batches * rule.mini_batch
    pair.start(rule.max_required, size, max_retries=0, max_crashes=10**6)
    pair.issue(total, end=True)
    pair.sync(["a", "b"])
    model, step, idle = pair.model, 0, 0
    while True:
        dead = reclaimed = dropped = 0
        updates = 0
        while updates < rule.sync_steps:
            moved = 0
            for owner in ("a", "b"):
                for item in pair.take(owner, 2).items:
                    moved += 1
                    if not dead:
                        dead += 1
                        pair("fail", owner, item.sample_id, item.attempt, "reward", "")
                    elif not reclaimed:
                        reclaimed += 1
                        pair("expire", owner, "lease")
                        pair("admit", model.term, owner, model.version)
                    else:
                        pair.finish(owner, item.sample_id, item.attempt)
            reply = pair.claim(model.version, size)
            ids = [item.sample_id for item in reply.items]
            if ids and not dropped:
                dropped += 1
                pair("drop", model.lineage, ids[:1], "filter")
                ids = ids[1:]
            if reply.status == "done":
                assert sum(model.stats().counts[s] for s in ("trained", "dead", "dropped")) == total
                return int(model.version)
            if reply.items:
                step += 1
                updates += 1
                pair("train", model.lineage, step, ids)
            idle = 0 if moved or reply.items else idle + 1
            assert idle < 3, f"nothing moves: {model.stats()}"
        assert pair.sync(["a", "b"]).status == "ok"


RULES = [
    StalenessRule(1, 1, 4, 0.0, False),
    StalenessRule(2, 1, 4, 0.0, False),
    StalenessRule(2, 2, 3, 0.0, False),
    StalenessRule(1, 1, 4, 0.5, True),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_dead_reclaimed_and_dropped_samples_in_each_window_do_not_close_the_gate_for_ever(
    lockstep: Make, rule: StalenessRule
) -> None:
    assert drive_to_done(lockstep(), rule, total=61) >= 3


@pytest.mark.parametrize("rule", RULES[:3], ids=str)
def test_the_schedule_stops_a_gate_that_counts_beside_the_ledger(rule: StalenessRule) -> None:
    with pytest.raises(AssertionError, match="nothing moves"):
        drive_to_done(ModelOnly(WeakGate()), rule, total=61)


def test_what_may_kill_its_owner_goes_out_one_at_a_time(lockstep: Make) -> None:
    """A poison prompt dies alone: whoever has shared its fate twice is not with it the third time."""
    pair = lockstep()
    pair.start(8, 1, max_retries=0, max_crashes=3)
    pair.issue(12)
    pair.sync(["a", "b"])
    poison, crashes, step = "0000000002", 0, 0
    dead: list[str] = []
    while not dead:
        for owner in ("a", "b"):
            pair.take(owner, 4)
        running = pair.model.within(State.IN_FLIGHT)
        assert running, "everybody stands still"
        for owner in ("a", "b"):
            held = [s for s in running if s.owner == owner]
            assert sum(s.crashes >= SUSPECT for s in held) <= 1, "two suspects with one owner"
            if any(s.id == poison for s in held):
                dead = pair("expire", owner, "it died").dead
                crashes += 1
                continue
            for s in held:
                pair.finish(owner, s.id, s.attempt)
        while items := pair.claim(pair.model.version, 1).items:
            step += 1
            pair("train", 1, step, [items[0].sample_id])
        pair.sync(["a", "b"])
    assert dead == [poison], "an innocent died with it"
    assert crashes == 4
