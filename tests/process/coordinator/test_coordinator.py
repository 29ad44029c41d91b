"""Sync rounds: the real coordinator process on a real Valkey, with scripted members and trainers.

What the coordinator does in which situation is in the scenarios of `tests/fast/coordinator/scenarios`;
here is what they leave out: gRPC, Valkey, the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from headrace.ledger import ops
from headrace.ledger.replies import TakeStatus
from headrace.local.valkey_server import ValkeyServer, start_valkey
from headrace.v1 import sync_pb2 as pb
from tests.support.coordinator_peers import CANARY_DIFF, Member, Trainer, hang_up
from tests.support.coordinator_process import PASSWORD, Coordinator, until

Make = Callable[..., Awaitable[Coordinator]]

FIRST = ("pause", "join", "load", "resume")
"""What a member hears in a round with a new group; without one there is no join."""
REUSED = ("pause", "load", "resume")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path_factory.mktemp("valkey"), PASSWORD) as server:
        yield server


@pytest.fixture
async def make(tmp_path: Path, valkey: ValkeyServer, request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[Coordinator] = []

    async def make_(up: bool = True, **settings: Any) -> Coordinator:
        name = f"{abs(hash(request.node.nodeid))}-{len(made)}"
        made.append(Coordinator(tmp_path / name, valkey, settings))
        return await made[-1].up() if up else made[-1]

    yield make_
    for coordinator in made:
        await coordinator.close()


async def two(c: Coordinator, version: int = -1) -> tuple[Member, Member, Trainer]:
    """Members a and b and a trainer; with `version` 0 the first round is over."""
    a, b, trainer = await c.member("a"), await c.member("b"), await c.trainer()
    if version == 0:
        await sync(trainer, 0, {a: FIRST, b: FIRST})
    return a, b, trainer


async def sync(
    trainer: Trainer, version: int, members: dict[Member, tuple[str, ...]], attempts: int = 1
) -> pb.Committed:
    """One round in which everybody does as told."""
    trainer.begin(version)
    for member, kinds in members.items():
        resume = (await member.expect(*kinds))[-1]
        assert resume.version == version
    new_group = any("join" in kinds for kinds in members.values()) or not members
    await trainer.expect(*(["form"] if new_group else []), "send")
    *_, committed = await trainer.expect(*["form", "send"] * (attempts - 1), "committed")
    assert (committed.version, committed.members) == (version, len(members))
    assert committed.attempts == attempts
    for _ in members:
        (canary,) = await trainer.expect("canary")
        assert (canary.version, canary.max_abs_diff) == (version, CANARY_DIFF)
    return committed


async def test_rounds_from_the_first_to_a_new_member(make: Make) -> None:
    c = await make()
    a, b, trainer = await c.member("a", workers=1), await c.member("b", workers=1), await c.trainer()
    trainer.begin(0)
    _, join_a, load_a, resume_a = await a.expect(*FIRST)
    _, join_b, _, resume_b = await b.expect(*FIRST)
    assert {join_a.rank_offset, join_b.rank_offset} == {1, 2}
    assert join_a.rendezvous == join_b.rendezvous
    rendezvous = join_a.rendezvous
    assert (rendezvous.host, rendezvous.port, rendezvous.transport) == ("127.0.0.1", 1, "gloo")
    assert rendezvous.world_size == 3
    assert resume_a.version == resume_b.version == 0
    assert list(resume_a.canary.token_ids) == [1, 7]
    form, _, committed = await trainer.expect("form", "send", "committed")
    assert form.rendezvous == rendezvous
    assert (committed.version, committed.round, committed.members, committed.attempts) == (0, 1, 2, 1)
    times = [committed.pause_s, committed.transfer_s, committed.commit_s, committed.total_s]
    assert min(times) >= 0
    assert committed.total_s == pytest.approx(sum(times[:3]))
    canaries = await trainer.expect("canary", "canary")
    assert {(r.incarnation, r.version, r.max_abs_diff) for r in canaries} == {
        ("a", 0, CANARY_DIFF),
        ("b", 0, CANARY_DIFF),
    }
    stats = c.stats()
    assert (stats.version, stats.digest, stats.held) == (0, "digest-1000", False)
    assert stats.members == {"a": 0, "b": 0}

    # The same roster needs no new group, but the transfer has a number of its own.
    trainer.begin(1)
    _, load, _ = await a.expect(*REUSED)
    await b.expect(*REUSED)
    assert load.session > load_a.session
    await trainer.expect("send", "committed", "canary", "canary")
    assert c.stats().members == {"a": 1, "b": 1}

    # A new member, with two workers, is brought up at once, and the next round has a group of all.
    new = await c.member("aa", workers=2)
    (join, _, resume) = await new.expect("join", "load", "resume")
    assert (join.rank_offset, join.rendezvous.world_size, resume.version) == (1, 3, 1)
    await trainer.expect("form", "send", "canary")
    trainer.begin(2)
    joins = [(await m.expect(*FIRST))[1] for m in (a, new, b)]
    assert [j.rank_offset for j in joins] == [1, 2, 4]
    assert {j.rendezvous.world_size for j in joins} == {5}
    assert {j.rendezvous.epoch for j in joins}.isdisjoint({rendezvous.epoch, join.rendezvous.epoch})
    assert c.stats().members == {"a": 2, "aa": 2, "b": 2}


async def test_a_member_that_goes_away_is_expired(make: Make) -> None:
    c = await make()
    a, b, trainer = await two(c, version=0)
    c.ledger.run(ops.issue(0, [b"prompt"], end=False))
    assert c.ledger.run(ops.take("b", 0, 1)).status is TakeStatus.OK
    newcomer = await c.member("c")  # so that the next round forms a group
    await newcomer.expect("join", "load", "resume")
    await trainer.expect("form", "send", "canary")
    b.answers["load"] = hang_up
    trainer.begin(1)
    for member in (a, newcomer):
        heard = await member.expect(*FIRST[:3], *FIRST[1:])
        joins = [command for command in heard if isinstance(command, pb.JoinGroup)]
        assert joins[-1].rendezvous.world_size == 3
        assert len({join.rendezvous.epoch for join in joins}) == len(joins)
    stats = c.stats()
    assert stats.members == {"a": 1, "c": 1}
    assert (stats.requeued, stats.in_flight_by_owner) == ({"expired": 1}, {})
    assert b.unread == ["pause", "join", "load"]
    b = Member(c.address, "b")
    c.peers.append(b)
    await b.connect()
    await b.expect("expelled")
    assert await b.ended() is grpc.StatusCode.OK


async def test_members_come_and_go_without_a_trace(make: Make) -> None:
    c = await make(sync={"pause_timeout_s": 60.0})
    assert c.process is not None
    process = psutil.Process(c.process.pid)
    trainer = await c.trainer()
    await sync(trainer, 0, {})
    stays = await c.member("stays")
    await stays.expect("join", "load", "resume")
    await trainer.expect("form", "send", "canary")

    async def change(number: int) -> None:
        """One comes, takes part in a round and goes: by leaving, or for good and all."""
        comes = await c.member(f"m{number}")
        await comes.expect("join", "load", "resume")
        await trainer.expect("form", "send", "canary")
        await sync(trainer, trainer.snapshot + 1, {stays: FIRST, comes: FIRST})
        if number % 2:
            comes.report(leaving=pb.MemberLeaving())
            await comes.ended()
        else:
            await comes.close()
            c.ledger.run(ops.expire(comes.name, "as the janitor does"))
        c.peers.remove(comes)
        await comes.close()

    def open_files() -> int:
        """But for the connections to Redis: a pool, which grows with what goes on at once."""
        redis = c.ledger.redis.connection_pool.connection_kwargs["port"]
        sockets = process.net_connections("tcp")
        return process.num_fds() - sum(bool(s.raddr) and s.raddr.port == redis for s in sockets)

    for number in range(5):
        await change(number)
    files, threads = open_files(), process.num_threads()
    for number in range(5, 55):
        await change(number)
    # gRPC's own pool of threads grows by one or two under load; fifty members that left a trace would show.
    files, threads = files + 5, threads + 5
    await until(lambda: open_files() <= files, f"{files} open files, not {open_files()}")
    await until(lambda: process.num_threads() <= threads, f"{threads} threads")
    assert c.stats().members.keys() <= {"stays", "m54"}
    assert (await c.status()).joiners == []
