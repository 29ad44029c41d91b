"""A rollouter's signs of life: real Valkey, a real thread, and an event loop that stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from headrace.ledger import SyncLedger, ops
from headrace.ledger.client import LedgerUnavailable, LoginRefused
from headrace.redis_connect import connect
from headrace.v1 import sync_pb2 as pb
from headrace.valkey_server import ValkeyServer, start_valkey
from headrace_rollouter.beats import Beats
from headrace_rollouter.member import Member

OWNER = "rollouter-0-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = start_valkey(tmp_path_factory.mktemp("valkey"), "beats", None)
    yield server
    server.stop()


@pytest.fixture
def ledger(server: ValkeyServer) -> SyncLedger:
    ledger = SyncLedger(redis.Redis.from_url(server.url), "beats")
    ledger.redis.flushall()
    ledger.run(ops.configure(9, 2, 1, 1, 1000, "print"))
    return ledger


def beats(ledger: SyncLedger, lease_s: float = 0.5, outage_s: float = 30.0, url: str = "") -> Beats:
    own = SyncLedger(connect(url, 1.0) if url else ledger.redis, "beats", retry_s=0.0)
    return Beats(own, OWNER, lease_s, outage_s)


def count(ledger: SyncLedger) -> int:
    return ledger.run(ops.beats()).get(OWNER, 0)


async def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.01)


def stand_still_until(condition: Any) -> None:
    """As loading an engine does: the event loop gets no turn."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_it_beats_while_the_event_loop_stands_still(ledger: SyncLedger) -> None:
    b = beats(ledger)
    b.start()
    stand_still_until(lambda: count(ledger) >= 8)  # well over a lease
    b.stop()
    after = count(ledger)
    assert not b.expired.is_set()
    ledger.run(ops.expire(OWNER, "left"))
    assert after >= 8
    assert count(ledger) == 0, "who has left does not come back"


async def test_a_loop_that_has_turned_and_stands_still_for_a_lease_is_silent(ledger: SyncLedger) -> None:
    b = beats(ledger)
    b.start()
    b.turned()

    def stands_still() -> bool:
        """No beat within twice the period, after the loop's lease."""
        before = count(ledger)
        until_s = time.monotonic() + 0.25
        stand_still_until(lambda: time.monotonic() > until_s)
        return count(ledger) == before

    stand_still_until(stands_still)
    silent = count(ledger)
    b.turned()
    await until(lambda: count(ledger) > silent, "beats to go on with the loop")
    b.stop()


async def test_it_hears_that_it_was_expired(ledger: SyncLedger) -> None:
    b = beats(ledger)
    b.start()
    await until(lambda: count(ledger) >= 2, "two beats")
    assert not b.expired.is_set()
    ledger.run(ops.expire(OWNER, "silent"))
    await asyncio.wait_for(b.expired.wait(), 10)
    b.stop()


async def test_an_outage_is_waited_for_and_a_longer_one_ends_it(ledger: SyncLedger) -> None:
    b = beats(ledger, outage_s=0.4, url="redis://127.0.0.1:1/0")
    b.start()
    with pytest.raises(LedgerUnavailable):
        await asyncio.wait_for(b.failed(), 20)
    b.stop()


async def test_a_refused_login_ends_it_at_once(server: ValkeyServer, ledger: SyncLedger) -> None:
    b = beats(ledger, url=server.url.replace(":beats@", ":wrong@"))
    b.start()
    with pytest.raises(LoginRefused):
        await asyncio.wait_for(b.failed(), 20)
    b.stop()


class Engine:
    workers = 1

    def __init__(self) -> None:
        self.pauses = 0

    async def pause(self) -> None:
        self.pauses += 1


class Worker:
    """Says what was dropped and stopped."""

    version = 3

    def __init__(self) -> None:
        self.did: list[str] = []

    async def drop_work(self) -> None:
        self.did.append("dropped")

    def paused(self) -> None:
        self.did.append("paused")


class Members:
    def __init__(self, *names: str) -> None:
        self.names = names

    async def run(self, op: Any) -> Any:
        assert op.script == "stats"
        return SimpleNamespace(members=dict.fromkeys(self.names, 3))


async def test_one_that_was_expired_drops_its_work_and_pauses_by_itself() -> None:
    engine, worker = Engine(), Worker()
    member = Member(SimpleNamespace(), engine, worker, OWNER, "127.0.0.1:1", "")  # type: ignore[arg-type]
    member._paused = False
    await member.expired(Members())  # type: ignore[arg-type]
    assert (worker.did, engine.pauses) == (["dropped", "paused"], 1)
    (report,) = [member._reports.get_nowait() for _ in range(member._reports.qsize())]
    assert report.WhichOneof("report") == "paused"


async def test_one_that_was_taken_in_again_meanwhile_keeps_what_it_has() -> None:
    engine, worker = Engine(), Worker()
    member = Member(SimpleNamespace(), engine, worker, OWNER, "127.0.0.1:1", "")  # type: ignore[arg-type]
    member._paused = False
    await member.expired(Members(OWNER))  # type: ignore[arg-type]
    assert (worker.did, engine.pauses, member._reports.qsize()) == ([], 0, 0)


async def test_the_news_waits_for_the_command_under_way() -> None:
    """Else a pause of its own could cross a load, or a resume."""
    engine, worker = Engine(), Worker()
    member = Member(SimpleNamespace(), engine, worker, OWNER, "127.0.0.1:1", "")  # type: ignore[arg-type]
    member._paused = False
    async with member._turn:
        news = asyncio.create_task(member.expired(Members()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert worker.did == []
    await asyncio.wait_for(news, 5)
    assert worker.did == ["dropped", "paused"]
    assert pb.MemberPause(drop_work=True).round == 0
