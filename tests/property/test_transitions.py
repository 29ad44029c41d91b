"""The table of transitions against server and model, the liveness of the gate, clients, observer, docs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from lockstep import LockStep
from redis.asyncio import Redis as AsyncRedis

from headrace.ledger import (
    AdoptError,
    AsyncLedger,
    BeatObserver,
    LedgerError,
    LedgerUnavailable,
    SyncLedger,
    audit,
    doc,
    ops,
    scripts,
)
from headrace.ledger import adopt as adopt_checkpoint
from headrace.ledger.model import Model
from headrace.ledger.states import ALLOWED, Event, State
from headrace.staleness import StalenessRule

Make = Callable[[], LockStep]
ID = "0000000000"


def bring_to(pair: LockStep, state: State) -> None:
    """A run whose sample 0 is in `state` (owner a, attempt 1 where it has one)."""
    pair.start(max_required=4, claim_size=1)
    pair.issue(1)
    pair.sync(["a", "b"])
    if state is State.READY:
        return
    pair.take("a", 1)
    if state is State.PARKED:
        pair("park", "a", ID, 1, b"work", 0)
    if state is State.DEAD:
        pair("fail", "a", ID, 1, "reward", "")
        pair.take("a", 1)
        pair("fail", "a", ID, 2, "reward", "no score")
    if state in (State.QUEUED, State.TRAINING, State.TRAINED, State.DROPPED):
        pair.finish("a", ID, 1)
    if state in (State.TRAINING, State.TRAINED):
        pair.claim(0, 1)
    if state is State.TRAINED:
        pair("train", 1, 1, [ID])
    if state is State.DROPPED:
        pair("drop", 1, [ID], "filter")


def attempts_of(event: Event) -> list[Callable[[LockStep], object]]:
    """Every way in which this event could move sample 0, right or wrong."""
    stale = [("b", 1), ("a", 0), ("a", 1), ("a", 2)]

    def adopting(name: str, argument: list[Any]) -> Callable[[LockStep], object]:
        def run(pair: LockStep) -> object:
            pair("open_lineage", 1, pair.request())
            return pair(name, 2, argument)

        return run

    def limit_zero(pair: LockStep) -> None:
        pair("configure", 4, 1, 0, 0, 1000, "print")

    table: dict[Event, list[Callable[[LockStep], object]]] = {
        Event.ISSUE: [lambda p: p.issue(1), lambda p: p("issue", 0, [b"x"], False, p.request())],
        Event.TAKE: [lambda p: p.take("a", 9), lambda p: p.take("x", 9), lambda p: p("take", "a", 7, 9, "q")],
        Event.FINISH: [lambda p, o=o, a=a: p.finish(o, ID, a) for o, a in stale]
        + [lambda p: p("finish", "a", ID, 1, b"x", 0, 1, 1)],
        Event.PARK: [lambda p, o=o, a=a: p("park", o, ID, a, b"w", 0) for o, a in stale],
        Event.HAND_BACK: [lambda p, o=o, a=a: p("hand_back", o, ID, a) for o, a in stale],
        Event.FAIL: [lambda p, o=o, a=a: p("fail", o, ID, a, "r", "d") for o, a in stale]
        + [lambda p: (limit_zero(p), p("fail", "a", ID, 1, "r", "d"))],
        Event.EXPIRE: [
            lambda p: p("expire", "a", "lease"),
            lambda p: p("expire", "b", "lease"),
            lambda p: (limit_zero(p), p("expire", "a", "lease")),
        ],
        Event.CLAIM: [lambda p: p.claim(0, 1), lambda p: p("claim", 0, 0, 1, "q"), lambda p: p.claim(5, 1)],
        Event.TRAIN: [lambda p: p("train", 1, 2, [ID]), lambda p: p("train", 0, 2, [ID])],
        Event.BURY: [lambda p: p("bury", 1, ID, "bad", ""), lambda p: p("bury", 0, ID, "bad", "")],
        Event.DROP: [lambda p: p("drop", 1, [ID], "x"), lambda p: p("drop", 0, [ID], "x")],
        Event.REQUEUE_DEAD: [lambda p: p("requeue_dead", ID), lambda p: p("requeue_dead", "nobody")],
        Event.ADOPT_TRAINED: [
            adopting("adopt_trained", [(ID, 3)]),
            lambda p: p("adopt_trained", 1, [(ID, 3)]),
        ],
        Event.ADOPT_REST: [adopting("adopt_rest", [ID]), lambda p: p("adopt_rest", 1, [ID])],
    }
    return table[event]


def test_every_event_on_every_state_takes_exactly_the_transitions_of_the_table(lockstep: Make) -> None:
    server: set[tuple[str, str | None, str]] = set()
    model: set[tuple[str, str | None, str]] = set()
    for state in State:
        for event in Event:
            for attempt in attempts_of(event):
                pair = lockstep()
                bring_to(pair, state)
                attempt(pair)
                attempt_again = pair.history[-1]
                pair(attempt_again[0], *attempt_again[1])  # the reply was lost: the same request once more
                server |= pair.seen
                model |= set(pair.model.log)
    assert server == ALLOWED
    assert model == ALLOWED


def test_unknown_ids_get_a_clean_answer(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.IN_FLIGHT)
    for name in ("", "nobody", "0000000009", "0" * 200):
        assert pair.finish("a", name, 1) == "fenced"
        assert pair("park", "a", name, 1, b"", 0) == "fenced"
        assert pair("hand_back", "a", name, 1) == "fenced"
        assert pair("fail", "a", name, 1, "r", "d") == "fenced"
        assert pair("train", 1, 1, [name]) == "unknown"
        assert pair("bury", 1, name, "r", "d") == "unknown"
        assert pair("drop", 1, [name], "r") == "unknown"
        assert pair("requeue_dead", name) == "unknown"
        assert pair.ledger.run(ops.sample(name)) is None
        assert pair.ledger.run(ops.payloads([name])) == [None]
    assert pair("expire", "nobody", "").requeued == []
    assert pair.model.stats().fenced == 16


def test_late_results_are_refused_counted_and_named(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.IN_FLIGHT)
    pair("expire", "a", "lease")
    assert pair.finish("a", ID, 1) == "fenced"
    assert pair.take("b", 1).items[0].attempt == 2
    assert pair.finish("a", ID, 1) == "fenced"
    assert pair.finish("b", ID, 2) == "ok"
    assert pair.ledger.run(ops.stats()).fenced_by == {"finish": 2}


def test_old_parked_work_starts_again_from_its_prompt(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.PARKED)
    pair.sync(["b"])
    assert pair.take("b", 1, 0).items[0].work == b"work"
    pair("park", "b", ID, 2, b"more", 0)
    assert pair.take("b", 1, 1).items[0].work is None
    assert pair.ledger.run(ops.stats()).restarted == 1


# -- liveness -------------------------------------------------------------------------------------


class WeakGate(Model):
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

    def __init__(self, model: Model) -> None:
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


# -- lineages -------------------------------------------------------------------------------------


def test_a_checkpoint_is_adopted_whatever_the_ledger_says(lockstep: Make, valkey: redis.Redis) -> None:
    pair = lockstep()
    pair.start(64, 4)
    pair.issue(20)
    pair.sync(["a"])
    for item in pair.take("a", 12).items[:10]:
        pair.finish("a", item.sample_id, item.attempt)
    for step in (1, 2):
        pair("train", 1, step, [c.sample_id for c in pair.claim(0, 4).items])
    manifest = {f"{n:010d}": 1 for n in range(4)}
    assert pair("open_lineage", 1, "open") == pair("open_lineage", 1, "open")
    assert not pair("open_lineage", 1, "other").ok
    ledger = pair.ledger
    ledger.run(ops.adopt_rest(2, [f"{n:010d}" for n in range(4, 9)]))  # cut off, and begun again
    adopt_checkpoint(ledger, 2, manifest)
    stats = ledger.run(ops.stats())
    assert stats.counts["trained"] == 4
    assert stats.counts["ready"] == 16
    assert stats.requeued == {"rollback": 4, "lineage": 4}
    assert stats.held
    assert stats.outstanding == stats.trained_since_sync == 0
    assert audit(valkey, "property").balanced
    with pytest.raises(AdoptError, match="newer lineage"):
        adopt_checkpoint(ledger, 1, manifest)


def test_a_checkpoint_of_another_run_is_refused(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.TRAINED)
    pair("open_lineage", 1, "q")
    with pytest.raises(AdoptError, match="never issued"):
        adopt_checkpoint(pair.ledger, 2, {"0000000005": 1})


def test_a_trimmed_prompt_cannot_be_rolled_back(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.TRAINED)
    assert pair("trim", 1) == 1
    pair("open_lineage", 1, "q")
    assert pair("adopt_rest", 2, [ID]).status == "trimmed"
    with pytest.raises(AdoptError, match="trimmed"):
        adopt_checkpoint(pair.ledger, 2, {})
    adopt_checkpoint(pair.ledger, 2, {ID: 1})


def test_the_commit_waits_for_the_closing_window_and_the_bound_holds_in_between(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(max_required=4, claim_size=2)
    pair.issue(12)
    pair.sync(["a"])
    for item in pair.take("a", 4).items:
        pair.finish("a", item.sample_id, item.attempt)
    first = [c.sample_id for c in pair.claim(0, 2).items]
    second = [c.sample_id for c in pair.claim(1, 2).items]  # the snapshot of version 1 is written
    m = pair.model
    pair("hold", m.term, m.round + 1, m.lineage)
    args = (m.term, m.round, m.lineage, 1, "d1", ["a"], False, False)
    assert pair("commit", *args).training == 2
    pair("train", 1, 1, first)
    pair("train", 1, 2, second)
    assert pair("commit", *args).status == "ok"
    assert pair("commit", *args).status == "ok"  # the reply was lost
    assert pair.ledger.run(ops.stats()).trained_since_sync == 2
    assert len(pair.take("a", 4).items) == 2


def test_stale_rounds_terms_and_lineages_are_fenced(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(4, 2)
    assert pair("release", 1, 0) == "ok"
    assert pair.ledger.run(ops.stats()).held  # no commit yet: nothing to go back to
    pair.sync(["a"])
    assert pair("hold", 1, 1, 1) == "fenced"  # round 1 has committed
    assert pair("hold", 0, 2, 1) == "fenced"
    assert pair("hold", 1, 2, 0) == "fenced"
    assert pair("hold", 1, 2, 1) == pair("hold", 1, 2, 1) == "ok"
    assert pair("admit", 1, "b", 0) == "refused"
    assert pair("commit", 1, 1, 1, 1, "d", [], False, False).status == "fenced"
    assert pair("commit", 1, 2, 1, 2, "d", [], False, False).status == "fenced"
    assert pair("release", 1, 2) == "ok"
    assert not pair.ledger.run(ops.stats()).held
    assert pair("commit", 1, 2, 1, 1, "d", [], False, False).status == "fenced"
    assert pair("admit", 1, "b", 0) == "ok"
    assert pair("remove_member", 0, "b") == "fenced"


def test_validation_gives_each_row_once_and_never_mixes_versions(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(4, 2)
    assert pair("val_load", [(n, b"row %d" % n) for n in range(12)]) == 12
    pair.sync(["a", "b"], validate=True)
    rows = pair("val_take", "a", 0, 5, "v1")
    assert rows == pair("val_take", "a", 0, 5, "v1")
    assert [row for row, _ in rows] == [0, 1, 2, 3, 4]
    assert pair("val_take", "x", 0, 5, "v2") == []
    assert pair("val_finish", "a", 0, 0, b"r0") == pair("val_finish", "a", 0, 0, b"r0") == "ok"
    assert pair("val_finish", "b", 0, 1, b"no") == "refused"
    pair("expire", "a", "lease")
    rest = pair("val_take", "b", 0, 99, "v3")
    assert len(rest) == 11
    for row, _ in rest[:-1]:
        pair("val_finish", "b", 0, row, b"r%d" % row)
    assert pair("val_status").open
    pair("val_finish", "b", 0, rest[-1][0], b"last")
    assert pair("val_status") == ops.r.ValStatus(0, 12, 12, False)
    assert pair("val_results", 0)[:2] == [b"r0", b"r1"]
    pair.sync(["b"], validate=True)
    assert len(pair("val_take", "b", 1, 2, "v4")) == 2
    pair.sync(["b"])
    assert pair("val_finish", "b", 1, 0, b"late") == "refused"
    assert pair("val_close", 1) == "ok"
    assert pair("val_results", 1) == []


def test_thousands_of_ids_in_one_call(valkey: redis.Redis) -> None:
    valkey.flushall()
    ledger, n = SyncLedger(valkey, "bulk"), 9000
    ids = [f"{i:010d}" for i in range(n)]
    ledger.run(ops.configure(n, n, 1, 1, n, "f"))
    ledger.run(ops.open_term())
    assert ledger.run(ops.open_lineage(0)).ok
    adopt_checkpoint(ledger, 1, {})
    ledger.run(ops.issue(0, [b"p"] * n, True))
    ledger.run(ops.hold(1, 1, 1))
    ledger.run(ops.commit(1, 1, 1, 0, "d", ["a"], False, False))
    taken = ledger.run(ops.take("a", 0, n)).items
    assert [t.sample_id for t in taken] == ids
    with valkey.pipeline(transaction=False) as pipe:
        for i in ids:
            pipe.evalsha(scripts.sha("finish"), 1, "headrace:{bulk}:meta", "a", i, 1, b"x", 0, 0, 1)  # type: ignore[no-untyped-call]
        valkey.script_load(scripts.source("finish"))
        pipe.execute()
    claimed = ledger.run(ops.claim(1, 0, n))
    assert [c.sample_id for c in claimed.items] == ids
    assert len(ledger.run(ops.payloads(ids))) == n
    assert ledger.run(ops.drop(1, ids[:1], "x")) == "ok"
    assert ledger.run(ops.train(1, 1, ids[1:])) == "ok"
    assert ledger.run(ops.claim(1, 0, n)).status == "done"
    assert audit(valkey, "bulk").balanced


# -- the audit sees what is wrong -----------------------------------------------------------------

P = "headrace:{property}:"


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c.hset(P + "inflight", ID, "a"),
        lambda c: c.zrem(P + "queued", ID),
        lambda c: c.delete(P + "samples"),
        lambda c: c.xadd(P + "samples", {"id": ID}),
        lambda c: c.hset(P + "s:" + ID, "state", "trained"),
        lambda c: c.delete(P + "s:" + ID),
        lambda c: c.sadd(P + "owned:a", ID),
        lambda c: c.zadd(P + "trained", {"0000000077": 1}),
        lambda c: c.hset(P + "meta", "issued_total", 2),
    ],
)
def test_the_audit_finds_damage(
    lockstep: Make, valkey: redis.Redis, damage: Callable[[redis.Redis], object]
) -> None:
    bring_to(lockstep(), State.QUEUED)
    assert audit(valkey, "property").balanced
    damage(valkey)
    report = audit(valkey, "property")
    assert not report.balanced
    assert report.problems[0] in report.text()


# -- clients --------------------------------------------------------------------------------------


class LosesReplies:
    """A TCP proxy that passes requests on and, while `lose` is above zero, hangs up instead of answering."""

    def __init__(self, port: int) -> None:
        self.lose = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            while data := near.recv(1 << 20):
                far.sendall(data)
                answer = far.recv(1 << 20)
                if b"EVAL" in data and self.lose > 0:
                    self.lose -= 1
                    return
                near.sendall(answer)

    def close(self) -> None:
        self._listener.close()


def test_a_lost_reply_is_repaired_by_both_clients(lockstep: Make, valkey: redis.Redis) -> None:
    pair = lockstep()
    bring_to(pair, State.READY)
    pair.issue(5)
    kwargs = valkey.connection_pool.connection_kwargs
    proxy = LosesReplies(kwargs["port"])
    url = f"redis://:{kwargs['password']}@127.0.0.1:{proxy.port}/0?protocol=2"
    sync = SyncLedger(redis.Redis.from_url(url), "property", retry_s=10)

    async def from_asyncio() -> Any:
        ledger = AsyncLedger(AsyncRedis.from_url(url), "property", retry_s=10)
        proxy.lose = 2
        reply = await ledger.run(ops.take("b", 0, 2))
        await ledger.redis.aclose()
        return reply

    proxy.lose = 2
    first = sync.run(ops.take("a", 0, 2))
    second = asyncio.run(from_asyncio())
    assert [i.sample_id for i in first.items] == ["0000000000", "0000000001"]
    assert [i.sample_id for i in second.items] == ["0000000002", "0000000003"]
    assert all(i.attempt == 1 for i in [*first.items, *second.items])
    proxy.lose = 1
    assert sync.run(ops.finish("a", ID, 1, b"x", 0, 0, 1)) == "duplicate"
    assert audit(valkey, "property").balanced
    proxy.close()


def test_an_unreachable_server_is_named_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"redis://:hush-hush@127.0.0.1:{port}/0"
    with pytest.raises(LedgerUnavailable, match=f"127.0.0.1:{port}") as sync_error:
        SyncLedger(redis.Redis.from_url(url), "r", retry_s=0.2).run(ops.stats())
    with pytest.raises(LedgerUnavailable, match=f"127.0.0.1:{port}") as async_error:
        asyncio.run(AsyncLedger(AsyncRedis.from_url(url), "r", retry_s=0.2).run(ops.stats()))
    assert "hush" not in f"{sync_error.value!r} {async_error.value!r}"


def test_a_run_that_is_not_configured_is_an_error_that_says_so(valkey: redis.Redis) -> None:
    ledger = SyncLedger(valkey, "nowhere")
    for name in scripts.names():
        if name != "configure":
            with pytest.raises(LedgerError, match="not configured"):
                ledger.run(ops.Op(name, (), lambda raw: raw))


def test_a_request_id_serves_one_request(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.READY)
    assert pair.ledger.run(ops.take("a", 0, 1, "same")).status == "ok"
    with pytest.raises(LedgerError, match="used by take"):
        pair.ledger.run(ops.take("b", 0, 1, "same"))


def test_a_second_fingerprint_is_refused(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(4, 2)
    assert pair("configure", 9, 2, 1, 1, 1000, "other").fingerprint == "print"
    assert pair("configure", 9, 2, 1, 1, 1000, "print").status == "ok"


# -- observer, scripts, docs ----------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_beat_that_stands_still_over_three_readings_and_one_lease_expires() -> None:
    clock = Clock()
    observer = BeatObserver(10.0, clock)
    seen = []
    for clock.now, beats in [(0, 1), (5, 1), (9.9, 1), (10, 1), (11, 2), (20.9, 2), (21, 2)]:
        seen.append(observer.observe({"a": beats}))
    assert seen == [[], [], [], ["a"], [], [], ["a"]]


def test_few_readings_expire_nobody_however_long_they_took() -> None:
    clock = Clock()
    observer = BeatObserver(10.0, clock)
    observer.observe({"a": 1})
    clock.now = 1000.0
    assert observer.observe({"a": 1}) == []
    assert observer.observe({"a": 1}) == ["a"]


def test_a_failed_reading_begins_the_observation_anew() -> None:
    clock = Clock()
    observer = BeatObserver(10.0, clock)
    for clock.now in (0.0, 5.0):
        observer.observe({"a": 1})
    observer.reset()
    for clock.now in (20.0, 25.0, 29.0):
        assert observer.observe({"a": 1}) == []
    clock.now = 30.0
    assert observer.observe({"a": 1, "b": 1}) == ["a"]
    assert observer.observe({"b": 1}) == []
    assert observer.observe({"a": 1, "b": 1}) == []


def test_scripts_use_no_transactions_and_keep_to_the_runs_keys() -> None:
    for name in scripts.names():
        text = scripts.source(name)
        assert "MULTI" not in text
        assert hasattr(ops, name) or name == "audit", name


def test_docs_are_current() -> None:
    path = Path(__file__).parents[2] / "docs" / "ledger.md"
    assert path.read_text() == doc.render(), "run: python -m headrace.ledger.doc > docs/ledger.md"
