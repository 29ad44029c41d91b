"""Clients over lost replies and lost servers, the audit, the observer of beats, and the documentation."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis as AsyncRedis

from headrace.ledger import (
    AsyncLedger,
    BeatObserver,
    LedgerError,
    LedgerUnavailable,
    SyncLedger,
    audit,
    ops,
    scripts,
)
from headrace.ledger import adopt as adopt_checkpoint
from headrace.ledger.states import State
from headrace.reference import ledger as doc
from tests.process.ledger.lockstep import ID, LockStep, bring_to

Make = Callable[[], LockStep]


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
        if name not in scripts.WITHOUT_A_RUN:
            with pytest.raises(LedgerError, match="not configured"):
                ledger.run(ops.Op(name, (), lambda raw: raw))
    (problem,) = audit(valkey, "nowhere").problems
    assert "holds no ledger of the run" in problem


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


def test_a_beat_that_stands_still_over_three_readings_and_one_lease_expires_once() -> None:
    clock = Clock()
    observer = BeatObserver(10.0, clock)
    seen = []
    for clock.now, beats in [(0, 1), (5, 1), (9.9, 1), (10, 1), (11, 1), (16, 2), (20.9, 2), (26, 2)]:
        seen.append(observer.observe({"a": beats}))
    assert seen == [[], [], [], ["a"], [], [], [], ["a"]]


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
    path = Path(__file__).parents[3] / "docs" / "ledger.md"
    assert path.read_text() == doc.render(), "run: python -m headrace.reference.ledger > docs/ledger.md"


def test_two_runs_on_one_server_do_not_see_each_other(valkey: redis.Redis) -> None:
    """Interleaved, with owners of the same name; each is held against a model of its own at every step."""
    valkey.flushall()
    left, right = LockStep(valkey, "left"), LockStep(valkey, "right")
    for pair, limit in ((left, 4), (right, 2)):
        pair.start(limit, 1)
        pair.issue(6)
    left.sync(["a"])
    assert right.take("a", 2).status == "held"
    right.sync(["a"])
    (first, *_) = left.take("a", 3).items
    assert len(right.take("a", 3).items) == 2
    left.finish("a", first.sample_id, first.attempt)
    left("expire", "a", "lease")
    assert set(right.model.members) == {"a"}
    right.check("expire")
    left.check("expire")
