"""How old a trained sample can get: random schedules never exceed the bound, and some reach it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.staleness import StalenessRule, gap_bound
from headrace.ledger import ops
from headrace.ledger.in_memory import InMemoryLedger
from tests.process.ledger.lockstep import LockStep
from tests.process.ledger.test_ledger_liveness import ModelOnly

OWNERS = ["a", "b", "c"]


class Schedule:
    """Rollouters, trainer and rounds that do, in random order, whatever the rule lets them do."""

    how_often = 0.1  # a fault happens, where others have a weight of 0.2 to 3

    def __init__(self, pair: Any, rule: StalenessRule, seed: int) -> None:
        self.pair, self.rule, self.random = pair, rule, random.Random(seed)
        self.size = rule.require_batches * rule.mini_batch
        self.running: dict[str, tuple[str, int, int]] = {}  # id -> owner, attempt, oldest version
        self.parked: dict[str, int] = {}
        self.window = self.updates = self.step = self.kept = 0
        self.lineage = 1
        self.claimed: list[tuple[str, int]] = []
        self.largest = 0
        self.restarted = 0
        self.rules = [(-1, rule)]
        self.wanted = rule
        self.limits: dict[int, int] = {}  # version -> limit that its commit sets
        pair.start(rule.max_required, self.size, max_retries=0, max_crashes=10**6)
        pair.sync(OWNERS)

    @property
    def faults(self) -> list[Callable[[], None]]:
        return [self.lose]

    @property
    def version(self) -> int:
        return int(self.pair.model.version)

    @property
    def oldest_allowed(self) -> int:
        through = self.rule.finish_through(self.version)
        return -1 if through is None else through + 1

    def take(self) -> None:
        owner = self.random.choice(OWNERS)
        self.pair.issue(2)
        for item in self.pair.take(owner, self.random.randint(1, 4), self.oldest_allowed).items:
            was = self.parked.pop(item.sample_id, None)
            self.restarted += was is not None and item.work is None
            oldest = self.version if was is None or item.work is None else was
            self.running[item.sample_id] = (owner, item.attempt, oldest)

    def finish(self, sample: str | None = None) -> None:
        if not self.running:
            return
        # Old work last: what makes samples old is that others overtake them.
        sample = sample or self.random.choice(sorted(self.running, reverse=True)[:3])
        owner, attempt, oldest = self.running.pop(sample)
        assert self.pair("finish", owner, sample, attempt, sample.encode(), oldest, self.version, 7) == "ok"

    def lose(self) -> None:
        """A drain parks one sample, or a crash takes back all that an owner has."""
        if not self.running:
            return
        sample = self.random.choice(sorted(self.running))
        owner, attempt, oldest = self.running[sample]
        if self.random.random() < 0.7:
            del self.running[sample]
            self.pair("park", owner, sample, attempt, b"work", oldest)
            self.parked[sample] = oldest
        else:
            self.running = {i: r for i, r in self.running.items() if r[0] != owner}
            self.pair("expire", owner, "lease")
            self.pair("admit", self.pair.model.term, owner, self.version)

    def train(self) -> None:
        if self.updates == self.rule.sync_steps:
            if self.window > self.version:
                return  # the round before is still running
            self.pair("hold", self.pair.model.term, self.pair.model.round + 1, self.lineage)
            self.window, self.updates = self.window + 1, 0
            self.snapshot()
            if self.wanted != self.rule:  # taken up with the snapshot, in force with its commit
                self.rule = self.wanted
                self.rules.append((self.window, self.rule))
                self.limits[self.window] = self.rule.max_required
        reply = self.pair.claim(self.window, self.size - len(self.claimed))
        if reply.status != "batch":
            return
        for item in reply.items:
            gap, bound = self.window - item.min_version, gap_bound(self.rules, item.min_version, self.kept)
            assert bound is None or gap <= bound, f"gap {gap}, the bound is {bound} under {self.rules}"
            self.largest = max(self.largest, gap)
            self.claims(item.sample_id, bound)
            if self.random.random() < 0.1:
                self.pair("drop", self.lineage, [item.sample_id], "filter")
            else:
                self.claimed.append((item.sample_id, item.attempt))
        if len(self.claimed) < self.size:
            return  # refilled by the next claim
        self.step += 1
        kept = []
        for sample, attempt in self.claimed:
            if self.random.random() < 0.1:
                self.pair("reject", self.lineage, sample, attempt, "non_finite", "")
            else:
                kept.append(sample)
        self.pair("train", self.lineage, self.step, kept)
        self.claimed = []
        self.updates += 1

    def commit(self) -> None:
        if self.window == self.version:
            return
        through = self.rule.finish_through(self.window)
        for sample, (_, _, oldest) in list(self.running.items()):
            if through is not None and oldest <= through:
                self.finish(sample)
        m = self.pair.model
        limit = self.limits.pop(self.window, 0)
        digest = f"d{self.window}"
        args = (m.term, m.round, self.lineage, self.window, digest, OWNERS, False, False, limit)
        assert self.pair("commit", *args).status == "ok"

    def snapshot(self) -> None:
        """The window that has just begun has a policy of its own."""

    def claims(self, sample: str, bound: int | None) -> None:
        """The window trains it."""

    def run(self, steps: int, tunings: Sequence[tuple[int, float]] = ()) -> int:
        """The largest version gap of anything trained. `tunings`: S and eta that are wanted at some time."""
        bound = None if tunings else self.rule.largest_gap
        actions: list[Callable[[], None]] = [self.take, self.finish, self.train, self.commit]
        weights = [self.random.uniform(0.2, 3.0) for _ in actions] + [self.how_often for _ in self.faults]
        actions += self.faults
        due = sorted(self.random.sample(range(steps), len(tunings)))
        for step in range(steps):
            if step in due:
                steps_, threshold = tunings[due.index(step)]
                self.wanted = replace(self.wanted, sync_steps=steps_, threshold=threshold)
            self.random.choices(actions, weights)[0]()
            assert bound is None or self.largest <= bound, f"gap {self.largest}, the bound is {bound}"
        return self.largest

    def drain(self) -> None:
        """It goes on: with everybody at work the next window is trained and committed."""
        goal = self.version + 2
        for _ in range(2000):
            for action in (self.take, self.take, self.finish, self.finish, self.train, self.commit):
                action()
            if self.version >= goal:
                return
        raise AssertionError(f"nothing moves: {self.pair.model.stats()} under {self.rules}")


rules = st.builds(
    StalenessRule,
    sync_steps=st.integers(1, 3),
    require_batches=st.integers(1, 2),
    mini_batch=st.integers(1, 4),
    threshold=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0]),
    partial_rollout=st.booleans(),
    max_version_gap=st.none() | st.integers(1, 4),
)


@given(rules, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_no_schedule_exceeds_the_bound(rule: StalenessRule, seed: int) -> None:
    Schedule(ModelOnly(InMemoryLedger()), rule, seed).run(200)


@pytest.mark.parametrize("rule", [StalenessRule(2, 1, 2, 0.5, True, 2), StalenessRule(1, 1, 3, 0.0, False)])
def test_the_server_keeps_the_bound_as_the_model_does(
    lockstep: Callable[[], LockStep], rule: StalenessRule
) -> None:
    Schedule(lockstep(), rule, seed=7).run(250)


tunings = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.5, 2.0])), min_size=1, max_size=4
)


@given(
    rules.filter(lambda rule: rule.threshold > 0 or not rule.partial_rollout), tunings, st.integers(0, 2**32)
)
@settings(max_examples=200, deadline=None)
def test_no_schedule_exceeds_the_bound_while_the_rule_changes(
    rule: StalenessRule, wanted: list[tuple[int, float]], seed: int
) -> None:
    schedule = Schedule(ModelOnly(InMemoryLedger()), rule, seed)
    schedule.run(250, wanted)
    schedule.drain()


def test_the_server_takes_up_a_change_as_the_model_does(lockstep: Callable[[], LockStep]) -> None:
    schedule = Schedule(lockstep(), StalenessRule(3, 1, 2, 0.5, True, 2), seed=11)
    schedule.run(250, [(1, 0.25), (4, 1.0), (1, 0.1)])
    assert len(schedule.rules) > 2
    assert schedule.pair.ledger.run(ops.stats()).max_required in {r.max_required for _, r in schedule.rules}


def test_the_bound_of_a_change_is_reached() -> None:
    """From long windows to short ones: what was allowed to wait for one window waits for several."""
    rule, wanted = StalenessRule(4, 1, 1, 1.0, False), [(1, 0.1)]
    bound = gap_bound([(0, rule), (1, replace(rule, sync_steps=1, threshold=0.1))], 0)
    found = max(Schedule(ModelOnly(InMemoryLedger()), rule, seed).run(250, wanted) for seed in range(200))
    assert rule.largest_gap == 1 < found == bound == 4


@given(rules)
def test_without_a_change_the_bound_is_the_rules(rule: StalenessRule) -> None:
    bound, largest = gap_bound([(-1, rule)], 3), rule.largest_gap
    assert (bound is None) == (largest is None)
    assert bound is None or largest is None or bound <= largest


REACHED = [
    StalenessRule(1, 1, 4, 0.5, False),
    StalenessRule(1, 1, 2, 1.0, False),
    StalenessRule(1, 1, 2, 2.0, False),
    StalenessRule(1, 1, 2, 1.0, True, 1),
    StalenessRule(1, 1, 2, 1.0, True, 2),
    StalenessRule(1, 1, 2, 1.0, True, 4),
    StalenessRule(2, 1, 2, 0.5, True, 3),
]


@pytest.mark.parametrize("rule", REACHED, ids=str)
def test_the_bound_is_reached(rule: StalenessRule) -> None:
    found = max(Schedule(ModelOnly(InMemoryLedger()), rule, seed).run(250) for seed in range(60))
    assert found == rule.largest_gap


def test_without_a_limit_a_straggler_crosses_any_number_of_syncs() -> None:
    rule = StalenessRule(1, 1, 2, 1.0, True)
    assert rule.largest_gap is None
    s = Schedule(ModelOnly(InMemoryLedger()), rule, seed=0)
    while not s.running:
        s.take()
    straggler = min(s.running)
    for _ in range(200):
        s.take()
        for sample in [i for i in s.running if i != straggler]:
            s.finish(sample)
        s.train()
        s.commit()
    before, crossed = s.largest, s.version
    s.finish(straggler)
    while s.largest == before:
        s.take()
        s.finish()
        s.train()
        s.commit()
    assert s.largest >= crossed > 20 > before


def test_parked_work_past_the_limit_starts_again() -> None:
    rule = StalenessRule(1, 1, 2, 1.0, True, 1)
    schedules = [Schedule(ModelOnly(InMemoryLedger()), rule, seed) for seed in range(60)]
    for schedule in schedules:
        schedule.run(250)
    assert sum(s.restarted for s in schedules) > 0
    assert all(s.restarted == s.pair.model.restarted for s in schedules)
