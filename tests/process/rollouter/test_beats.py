"""A rollouter's signs of life: real Valkey, a real thread, and an event loop that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from headrace.config.run import SyncConfig
from headrace.connections.redis_client import connect
from headrace.ledger import SyncLedger, ops
from headrace.ledger.client import LedgerUnavailable, LoginRefused
from headrace.local.valkey_server import ValkeyServer, start_valkey
from headrace.v1 import sync_pb2 as pb
from headrace_rollouter.inference.engine import EngineFailed
from headrace_rollouter.membership.beats import Beats
from headrace_rollouter.membership.member import Expelled, Member

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
    turning = asyncio.create_task(b.run())
    await asyncio.sleep(0)
    stand_still_until(lambda: not b._gets_on())

    def pass_by(seconds: float) -> None:
        until_s = time.monotonic() + seconds
        stand_still_until(lambda: time.monotonic() > until_s)

    pass_by(0.5)  # one that was under way has ended
    silent = count(ledger)
    pass_by(4 * b._period_s)
    assert count(ledger) == silent
    await until(lambda: count(ledger) > silent, "beats to go on with the loop")
    turning.cancel()
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
        await asyncio.wait_for(b.run(), 20)
    b.stop()


async def test_a_refused_login_ends_it_at_once(server: ValkeyServer, ledger: SyncLedger) -> None:
    b = beats(ledger, url=server.url.replace(":beats@", ":wrong@"))
    b.start()
    with pytest.raises(LoginRefused):
        await asyncio.wait_for(b.run(), 20)
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
        self.serving = asyncio.Event()
        self.serving.set()

    async def drop_work(self) -> None:
        self.did.append("dropped")

    async def drop_lost(self) -> None:
        self.did.append("dropped what is lost")

    def paused(self) -> None:
        self.did.append("paused")
        self.serving.clear()


SYNC = SimpleNamespace(pause_timeout_s=0.1, rendezvous_timeout_s=0.1)


def member_of(engine: Engine, worker: Worker) -> Member:
    """One that generates."""
    config = SimpleNamespace(sync=SYNC)
    return Member(config, engine, worker, OWNER, "127.0.0.1:1", "")  # type: ignore[arg-type]


class Members:
    def __init__(self, *names: str) -> None:
        self.names = names

    async def run(self, op: Any) -> Any:
        assert op.script == "stats"
        return SimpleNamespace(members=dict.fromkeys(self.names, 3))


async def test_one_that_was_expired_drops_its_work_and_pauses_by_itself() -> None:
    engine, worker = Engine(), Worker()
    member = member_of(engine, worker)
    assert await member.expired(Members())  # type: ignore[arg-type]
    assert (worker.did, engine.pauses) == (["dropped", "paused"], 1)
    (report,) = [member.stream.outgoing.get_nowait() for _ in range(member.stream.outgoing.qsize())]
    assert report is not None
    assert report.WhichOneof("report") == "paused"


async def test_one_that_was_taken_in_again_meanwhile_drops_only_what_it_has_lost() -> None:
    engine, worker = Engine(), Worker()
    member = member_of(engine, worker)
    await member.expired(Members(OWNER))  # type: ignore[arg-type]
    assert (worker.did, engine.pauses, member.stream.outgoing.qsize()) == (["dropped what is lost"], 0, 0)


async def test_a_ledger_that_does_not_answer_costs_no_turn_and_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace_rollouter.membership.member._ASK_S", 0.05)
    engine, worker = Engine(), Worker()

    class Silent:
        async def run(self, op: Any) -> Any:
            await asyncio.Event().wait()

    member = member_of(engine, worker)
    assert not await asyncio.wait_for(member.expired(Silent()), 10)  # type: ignore[arg-type]
    assert (worker.did, engine.pauses) == ([], 0)


async def test_the_news_waits_for_the_command_under_way() -> None:
    """Else a pause of its own could cross a load, or a resume."""
    engine, worker = Engine(), Worker()
    member = member_of(engine, worker)
    async with member._turn:
        news = asyncio.create_task(member.expired(Members()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert worker.did == []
    await asyncio.wait_for(news, 5)
    assert worker.did == ["dropped", "paused"]
    assert pb.MemberPause(drop_work=True).round == 0


async def test_an_engine_that_lives_and_does_not_pause_ends_the_rollouter() -> None:
    class Hangs(Engine):
        async def pause(self) -> None:
            await asyncio.Event().wait()

    with pytest.raises(EngineFailed, match=r"has not paused within 0\.2 s"):
        await asyncio.wait_for(member_of(Hangs(), Worker())._pause(pb.MemberPause()), 10)


async def test_an_expulsion_is_heard_while_another_command_takes_its_time() -> None:
    class Hangs(Engine):
        async def pause(self) -> None:
            await asyncio.Event().wait()

    class Stub:
        def Member(self, reports: Any, metadata: Any) -> Any:
            return Call()

    class Call:
        async def initial_metadata(self) -> None:
            pass

        def done(self) -> bool:
            return False

        async def __aiter__(self) -> Any:
            yield pb.MemberCommand(pause=pb.MemberPause())
            yield pb.MemberCommand(expelled=pb.Expelled(reason="did not pause in time"))
            await asyncio.Event().wait()

    member = member_of(Hangs(), Worker())
    member._config.sync = SyncConfig(pause_timeout_s=60.0, rendezvous_timeout_s=60.0)
    with pytest.raises(Expelled, match="did not pause in time"):
        await asyncio.wait_for(member.stream._connection(Stub()), 10)


async def test_what_would_be_let_finish_is_not_waited_for_once_it_is_others() -> None:
    engine, worker = Engine(), Worker()
    worker.taking, worker.running, worker.scored = True, 1, 0  # type: ignore[attr-defined]
    worker.trace = SimpleNamespace(slice=lambda *_, **__: contextlib.nullcontext())  # type: ignore[attr-defined]
    engine.generated_tokens = 0  # type: ignore[attr-defined]
    member = member_of(engine, worker)
    command = pb.MemberCommand(pause=pb.MemberPause(finish_through=1))
    pausing = asyncio.create_task(member._deal(command))
    await until(lambda: member.stream.outgoing.qsize() > 0, "it to let work finish")
    await asyncio.wait_for(member.expired(Members()), 10)  # type: ignore[arg-type]
    await asyncio.wait_for(pausing, 10)
    assert worker.did == ["paused", "dropped"]
