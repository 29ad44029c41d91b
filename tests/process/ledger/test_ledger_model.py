"""Random schedules against the real server and the in-memory ledger in lock-step.

Several owners, rounds with hold and commit, deaths by expiry, failed and dead samples, drops, parked work,
lineages re-opened with a manifest, and any earlier request once more at any later time: a lost reply when
it comes at once, a stale owner writing late when it does not. After every call `LockStep.check` compares
answers, statistics and records, and asserts balance, audit, the gate's bound and the table of transitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.ledger.in_memory_samples import Record
from headrace.ledger.keep import UNBOUNDED, Keep
from headrace.ledger.states import State
from tests.process.ledger.lockstep import LockStep

OWNERS = ["a", "b", "c"]
owners = st.sampled_from(OWNERS)
picks = st.integers(0, 1000)
mostly = st.sampled_from([True] * 7 + [False])
rarely = st.sampled_from([False] * 15 + [True])
keeps = st.none() | st.builds(
    Keep,
    parent=st.integers(0, 3),
    windows=st.integers(0, 2),
    gap=st.integers(UNBOUNDED, 4),
    crosses=st.integers(1, 3),
    window=st.integers(1, 3),
    limit=st.sampled_from([9, 9, 2, 0]),
    scoring=st.sampled_from(["same"] * 7 + ["other"]),
)


def when(*states: State) -> Any:
    """The rule needs a sample in one of these states."""
    return precondition(lambda self: bool(self.m.within(*states)))


class Schedules(RuleBasedStateMachine):
    def __init__(self, make: Callable[[], LockStep]) -> None:
        super().__init__()
        self.pair = make()
        self.step = 0

    def quiet_for(self, calls: int) -> bool:
        """So many calls since the last round or lineage: rarer events leave room for work between them."""
        names = [name for name, _ in self.pair.history[-calls:]]
        return len(names) == calls and not {"commit", "open_lineage"} & set(names)

    @property
    def m(self) -> Any:
        return self.pair.model

    def pick(self, index: int, *states: State) -> Record | None:
        """One of the samples in these states (any, when none is), or None before the first issue."""
        found = self.m.within(*states) or self.m.records
        return found[index % len(found)] if found else None

    @initialize(
        limit=st.sampled_from([4, 6, 8, 2, 1]),
        retries=st.integers(0, 2),
        crashes=st.integers(0, 2),
        size=st.integers(1, 3),
    )
    def start(self, limit: int, retries: int, crashes: int, size: int) -> None:
        self.size = size
        self.pair.start(limit, size, retries, crashes)
        self.pair.issue(4)
        self.pair.sync(["a", "b"])

    # -- feeder and rollouters -------------------------------------------------------------------

    @rule(count=st.integers(0, 4), end=rarely, right=mostly)
    def issue(self, count: int, end: bool, right: bool) -> None:
        if right:
            self.pair.issue(count, end)
        else:
            self.pair("issue", len(self.m.records) + 1, [b"x"], False, self.pair.request())

    @precondition(lambda self: not self.m.held)
    @rule(index=picks, count=st.sampled_from([2, 3, 5, 1]), old=rarely)
    def take(self, index: int, count: int, old: bool) -> None:
        members = sorted(self.m.members) or OWNERS
        self.pair.take(members[index % len(members)], count, self.m.version if old else -1)

    @rule(owner=owners, count=st.integers(0, 5), fresh=mostly)
    def take_in_vain(self, owner: str, count: int, fresh: bool) -> None:
        self.pair("take", owner, self.m.version - int(not fresh), count, self.pair.request(), -1)

    def _owned(self, index: int, right: bool) -> tuple[str, str, int]:
        """(owner, id, attempt) as its owner knows them, or as somebody else would have them."""
        s = self.pick(index, State.IN_FLIGHT)
        assert s is not None
        if right:
            return s.owner, s.id, s.attempt
        return OWNERS[index % 3], s.id, s.attempt - index % 2

    @when(State.IN_FLIGHT)
    @rule(count=st.integers(1, 4))
    def finish_some(self, count: int) -> None:
        for s in self.m.within(State.IN_FLIGHT)[:count]:
            self.pair.finish(s.owner, s.id, s.attempt)

    @when(State.IN_FLIGHT)
    @rule(index=picks, right=mostly, ahead=rarely, age=st.integers(0, 2))
    def finish(self, index: int, right: bool, ahead: bool, age: int) -> None:
        high = self.m.version + int(ahead)
        payload = b"\x00\xff" + str(index).encode()
        self.pair("finish", *self._owned(index, right), payload, max(0, high - age), high, index)

    @when(State.IN_FLIGHT)
    @rule(index=picks, right=mostly, how=st.sampled_from(["park", "hand_back", "fail", "fail"]))
    def let_go(self, index: int, right: bool, how: str) -> None:
        extra: dict[str, tuple[Any, ...]] = {
            "park": (b"work %d" % index, max(0, self.m.version - index % 2)),
            "hand_back": (),
            "fail": (["reward", "timeout"][index % 2], "detail"),
        }
        self.pair(how, *self._owned(index, right), *extra[how])

    @when(State.IN_FLIGHT)
    @rule(index=picks, back=mostly, left=st.booleans())
    def expire(self, index: int, back: bool, left: bool) -> None:
        s = self.pick(index, State.IN_FLIGHT)
        assert s is not None
        owner = s.owner
        self.pair("expire", owner, "lease", None, left)
        if back:
            self.pair("admit", self.m.term, owner, self.m.version)

    @precondition(lambda self: self.m.phase != "adopting" and not self.m.held)
    @rule(
        fate=st.lists(st.sampled_from(["finish", "finish", "finish", "park", "keep", "fail"]), min_size=3),
        claims=st.integers(1, 2),
        trains=mostly,
        ahead=st.booleans(),
    )
    def good_work(self, fate: list[str], claims: int, trains: bool, ahead: bool) -> None:
        """What a run does most of the time."""
        self.pair.issue(3)
        for owner in sorted(self.m.members):
            self.pair.take(owner, 3)
        for s, what in zip(self.m.within(State.IN_FLIGHT), fate, strict=False):
            if what == "finish":
                self.pair.finish(s.owner, s.id, s.attempt)
            elif what == "park":
                self.pair("park", s.owner, s.id, s.attempt, b"work", self.m.version)
            elif what == "fail":
                self.pair("fail", s.owner, s.id, s.attempt, "reward", "detail")
        for _ in range(claims):
            self.pair.claim(self.m.version + int(ahead), self.size)
        if trains:
            self.step += 1
            ids = [s.id for s in self.m.within(State.TRAINING)]
            self.pair("train", self.m.lineage, self.step, ids[: len(fate)])

    # -- trainer ---------------------------------------------------------------------------------

    @when(State.QUEUED)
    @rule(ahead=st.sampled_from([0, 0, 0, 1, 1, -1, 2]), right=mostly)
    def claim(self, ahead: int, right: bool) -> None:
        lineage = self.m.lineage - int(not right)
        window = max(self.m.window, self.m.version + ahead) if right else self.m.version + ahead
        self.pair("claim", lineage, window, self.size, self.pair.request())

    @when(State.TRAINING)
    @rule(right=mostly, part=st.integers(1, 3), index=picks)
    def train(self, right: bool, part: int, index: int) -> None:
        ids = [s.id for s in self.m.within(State.TRAINING)][:part]
        if not right and (s := self.pick(index)):
            ids.append(s.id)
        self.step += 1
        self.pair("train", self.m.lineage - int(not right and index % 2), self.step, ids)

    @when(State.TRAINING, State.QUEUED)
    @rule(index=picks, right=mostly, how=st.sampled_from(["drop one", "drop two", "reject"]))
    def discard(self, index: int, right: bool, how: str) -> None:
        lineage = self.m.lineage - int(not right)
        ids = [s.id for i in range(index, index + 2) if (s := self.pick(i, State.TRAINING, State.QUEUED))]
        if how == "reject":
            s = self.m.records[int(ids[0])]
            self.pair(
                "reject",
                lineage,
                s.id,
                s.attempt - int(index % 5 == 0),
                "non_finite",
                "detail",
                bool(index % 2),
            )
        else:
            self.pair("drop", lineage, ids if how == "drop two" else ids[:1], "filter")

    @when(State.DEAD)
    @rule(index=picks, ended=rarely)
    def requeue_dead(self, index: int, ended: bool) -> None:
        if s := self.pick(index, State.DEAD):
            self.pair("requeue_dead", s.id, self.pair.request(), ended)

    # -- rounds ----------------------------------------------------------------------------------

    @precondition(lambda self: self.quiet_for(4) or self.m.held)
    @rule(members=st.sampled_from([["a", "b"], ["a", "b", "c"], ["c"], []]), train=mostly)
    def whole_round(self, members: list[str], train: bool) -> None:
        if train:
            self.step += 1
            self.pair("train", self.m.lineage, self.step, [s.id for s in self.m.within(State.TRAINING)])
        self.pair.sync(members)

    @precondition(lambda self: self.quiet_for(4))
    @rule(next_round=mostly, right=mostly)
    def hold(self, next_round: bool, right: bool) -> None:
        self.pair("hold", self.m.term - int(not right), self.m.round + int(next_round), self.m.lineage)

    @precondition(lambda self: self.m.phase == "syncing")
    @rule(
        members=st.lists(owners, unique=True),
        ahead=st.sampled_from([1, 1, 1, 1, 0, 2]),
        right=mostly,
        limit=st.sampled_from([0, 0, 0, 1, 3, 9]),
    )
    def commit(self, members: list[str], ahead: int, right: bool, limit: int) -> None:
        m = self.m
        round_, version = m.round - int(not right), m.version + ahead
        self.pair("commit", m.term, round_, m.lineage, version, f"d{version}", members, False, False, limit)

    @rule(
        what=st.sampled_from(["admit", "open_term", "trim", "limit", "commit", "complete"]),
        owner=owners,
        right=mostly,
        n=st.integers(1, 6),
    )
    def control(self, what: str, owner: str, right: bool, n: int) -> None:
        m, off = self.m, int(not right)
        args: dict[str, tuple[Any, ...]] = {
            "admit": (m.term, owner, m.version - off),
            "open_term": (),
            "complete": (m.lineage - off,),
            "trim": (max(-1, self.step - 2 - n),),
            "commit": (m.term, m.round, m.lineage, m.version + off, m.digest, ["a"], False, False),
        }
        if what == "limit":
            self.pair("configure", n, m.claim_size, m.max_retries, m.max_crashes, m.total, m.fingerprint)
        else:
            self.pair(what, *args[what])

    # -- lineages --------------------------------------------------------------------------------

    @precondition(lambda self: self.quiet_for(6) and self.m.lineage < 6)
    @rule(
        right=mostly,
        kept=st.integers(0, 4),
        extra=st.lists(picks, max_size=3),
        cut=rarely,
        finish=mostly,
        keep=keeps,
    )
    def new_lineage(
        self, right: bool, kept: int, extra: list[int], cut: bool, finish: bool, keep: Keep | None
    ) -> None:
        """A trainer starts from a checkpoint: all but the last `kept` steps, and ids that Redis forgot."""
        if not self.pair("open_lineage", self.m.lineage - int(not right), self.pair.request()).ok:
            return
        lineage = self.m.lineage
        manifest = {s.id: s.step for s in self.m.within(State.TRAINED) if s.step <= self.step - kept}
        manifest |= {s.id: 1 for i in extra if (s := self.pick(i, *State))}
        self.pair("adopt_trained", lineage, sorted(manifest.items()))
        rest = [s.id for s in self.m.records if s.id not in manifest]
        self.pair("adopt_rest", lineage, rest[: len(rest) // 2])
        if cut:
            return
        self.pair("adopt_rest", lineage, rest)
        if finish:
            self.pair("finish_adopt", lineage, self.of_now(keep))
            self.pair.sync(["a", "b"])

    @precondition(lambda self: self.m.phase == "adopting")
    @rule(keep=keeps)
    def finish_adopt(self, keep: Keep | None) -> None:
        self.pair("finish_adopt", self.m.lineage, self.of_now(keep))

    def of_now(self, keep: Keep | None) -> Keep | None:
        """`parent` says how many versions were lost."""
        return keep and replace(keep, parent=max(-1, self.m.version - keep.parent))

    # -- the past comes back ---------------------------------------------------------------------

    @rule(back=st.integers(1, 3))
    def reply_was_lost(self, back: int) -> None:
        name, args = self.pair.history[-min(back, len(self.pair.history))]
        self.pair(name, *args)

    @rule(index=picks)
    def anything_sent_before_arrives_again(self, index: int) -> None:
        name, args = self.pair.history[index % len(self.pair.history)]
        self.pair(name, *args)


@pytest.mark.timeout(7200)  # the thorough profile; the default one takes seconds
def test_server_and_model_agree_on_random_schedules(lockstep: Callable[[], LockStep]) -> None:
    # Any factory will do; the annotation names a class.
    run_state_machine_as_test(lambda: Schedules(lockstep), settings=settings())  # type: ignore[arg-type]
