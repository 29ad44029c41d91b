"""Leases: an owner's beats, the janitor's readings and the ledger's expiry together, over all their phases.

The owner's beats and the readings go to a real server; time is a number. Whatever the two sides' periods,
phases, silences and failed readings are:

- who is never silent for a lease is never expired;
- each silence that three good readings and a lease fit into costs one expiry, and only one;
- with the first beat after an expiry the owner knows of it, and nothing follows from what was before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.ledger import SyncLedger, ops
from headrace_queue import janitor as janitors
from headrace_queue.janitor import Janitor
from tests.support.queue_fakes import NoTelemetry

LEASE = 10.0
OWNER = "rollouter-0"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Now:
    """The ledger for the janitor's loop: answers at once."""

    run_name = "run"
    redis = NoTelemetry()

    def __init__(self, ledger: SyncLedger) -> None:
        self._ledger = ledger

    async def run(self, op: Any) -> Any:
        return self._ledger.run(op)


class World:
    def __init__(self, ledger: SyncLedger, clock: Clock) -> None:
        self.ledger = ledger
        self.clock = clock
        self.janitor = Janitor(Now(ledger), LEASE, None)  # type: ignore[arg-type]
        self.janitor._observer._clock = clock
        self.janitor._last_reading = clock()
        self.count = 0
        self.since = -1
        self.told = 0
        """Expiries that the owner has heard of."""

    def beat(self) -> None:
        self.count += 1
        since = self.ledger.run(ops.beat(OWNER, self.count))
        self.told += self.since not in (-1, since)
        self.since = since

    def read(self, fails: bool) -> None:
        if fails:
            self.janitor.interrupted()
        else:
            asyncio.run(self.janitor.step())


@pytest.fixture
def world(fresh_ledger: Callable[[], SyncLedger], monkeypatch: pytest.MonkeyPatch) -> Callable[[], World]:
    clock = Clock()
    monkeypatch.setattr(janitors.time, "monotonic", clock)  # type: ignore[attr-defined]

    def make() -> World:
        clock.now = 0.0
        return World(fresh_ledger(), clock)

    return make


@pytest.fixture
def fresh_ledger(valkey: redis.Redis) -> Callable[[], SyncLedger]:
    number = 0

    def make() -> SyncLedger:
        nonlocal number
        number += 1
        valkey.flushall()
        ledger = SyncLedger(valkey, f"leases-{number}", retry_s=1.0)
        ledger.run(ops.configure(9, 2, 1, 1, 1000, "print"))
        return ledger

    return make


seconds = st.floats(0.05, 1.0)
# Beats that come in time, then a silence; just over a lease is where the trouble was.
lives = st.lists(
    st.tuples(
        st.integers(1, 8), st.one_of(st.floats(LEASE - 1, LEASE + 2), st.floats(0, 3 * LEASE), st.just(0.0))
    ),
    min_size=1,
    max_size=4,
)


# `world` makes a new one for each example.
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    life=lives,
    every=seconds,
    offset=seconds,
    reads_every=seconds,
    fails=st.sets(st.integers(0, 80), max_size=6),
)
# It beats once, loads for a lease and half a second, and beats on.
@example(life=[(1, LEASE + 0.5), (8, 0.0)], every=1.0, offset=0.05, reads_every=1.0, fails=set())
def test_a_silence_costs_one_expiry_and_a_beat_none(
    world: Callable[[], World],
    life: list[tuple[int, float]],
    every: float,
    offset: float,
    reads_every: float,
    fails: set[int],
) -> None:
    w = world()
    beats_at: list[float] = []
    t = offset
    for beats, silence in life:
        for _ in range(beats):
            beats_at.append(t)
            t += every
        t += silence
    beats_at.append(t)
    end = t + every / 2
    reads_at = [n * reads_every for n in range(int(end / reads_every) + 1)]
    events = sorted([(at, 0, 0) for at in beats_at] + [(at, 1, n) for n, at in enumerate(reads_at)])
    good = [at for n, at in enumerate(reads_at) if n not in fails]
    for w.clock.now, kind, number in events:
        before = w.janitor.expired_owners
        if kind == 0:
            w.beat()
            assert w.told == w.janitor.expired_owners, "the beat after an expiry tells the owner"
            continue
        w.read(number in fails)
        last = max((at for at in beats_at if at <= w.clock.now), default=None)
        if w.janitor.expired_owners > before:
            assert last is not None
            assert w.clock.now - last >= LEASE, "it was heard within its lease"
    # Silences without a failed reading, long enough for a lease after the one that saw the last beat.
    must = 0
    for a, b in itertools.pairwise(beats_at):
        inside = [at for at in reads_at if a <= at < b]
        if inside and all(at in good for at in inside) and inside[-1] - inside[0] >= LEASE:
            must += 1
    most = sum(b - a >= LEASE for a, b in itertools.pairwise(beats_at))
    assert must <= w.janitor.expired_owners <= most, "one expiry for each silence"


def test_a_beat_between_reading_and_expiry_saves_the_owner(fresh_ledger: Callable[[], SyncLedger]) -> None:
    ledger = fresh_ledger()
    assert ledger.run(ops.beat(OWNER, 1)) == 1
    assert ledger.run(ops.beat(OWNER, 2)) == 1
    assert not ledger.run(ops.expire(OWNER, "silent", 1)).expired
    assert ledger.run(ops.beats()) == {OWNER: 2}
    assert not ledger.run(ops.expire(OWNER, "silent", ops.NEVER_BEAT)).expired
    assert ledger.run(ops.expire(OWNER, "silent", 2)).expired
    assert ledger.run(ops.beats()) == {}
    assert ledger.run(ops.expire(OWNER, "silent", ops.NEVER_BEAT)).expired


def test_the_owner_hears_of_its_expiry_also_when_the_reply_got_lost(
    fresh_ledger: Callable[[], SyncLedger],
) -> None:
    ledger = fresh_ledger()
    ledger.run(ops.beat(OWNER, 1))
    ledger.run(ops.expire(OWNER, "silent"))
    ledger.run(ops.beat(OWNER, 2))  # nobody reads this reply
    assert ledger.run(ops.beat(OWNER, 2)) == 2
    assert ledger.run(ops.beat(OWNER, 3)) == 2
    assert ledger.run(ops.beats()) == {OWNER: 3}, "no count comes twice"
