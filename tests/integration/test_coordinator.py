"""Sync rounds: the real coordinator process on a real Valkey, with scripted members and trainers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from headrace.ledger import ops
from headrace.ledger.replies import TakeStatus
from headrace.v1 import sync_pb2 as pb
from headrace.valkey_server import ValkeyServer, start_valkey
from tests.integration.coordinator_peers import CANARY_DIFF, Member, Trainer, hang_up
from tests.integration.coordinator_process import PASSWORD, Coordinator, until

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


async def test_nobody_there_and_late_joiners(make: Make) -> None:
    c = await make()
    trainer = await c.trainer()
    trainer.begin(0)
    form, _, committed = await trainer.expect("form", "send", "committed")
    assert (form.rendezvous.world_size, committed.members, c.stats().members) == (1, 0, {})

    late = await c.member("late")
    assert (await late.expect("join", "load", "resume"))[-1].version == 0
    await trainer.expect("form", "send", "canary")
    assert c.stats().members == {"late": 0}
    later = await c.member("later")
    await later.expect("join", "load", "resume")
    await trainer.expect("form", "send", "canary")
    assert c.stats().members == {"late": 0, "later": 0}
    assert late.unread == []

    # One that fails is out at once, and a next one is served; nobody else notices.
    unlucky = Member(c.address, "unlucky")
    c.peers.append(unlucky)
    unlucky.answers["load"] = lambda command: unlucky.failed(command, command.load.session)
    await unlucky.connect()
    (*_, expelled) = await unlucky.expect("welcome", "join", "load", "expelled")
    assert expelled.reason == "catch-up failed: unlucky: it was unlucky"
    assert await unlucky.ended() is grpc.StatusCode.OK
    await trainer.expect("form", "send")

    # A running engine that the ledger does not know (expired while the coordinator was away) is paused first.
    stray = await c.member("stray", version=0, paused=False)
    await stray.expect(*FIRST)
    await trainer.expect("form", "send", "canary")
    await sync(trainer, 1, {late: FIRST, later: FIRST, stray: FIRST})
    assert c.stats().members == {"late": 1, "later": 1, "stray": 1}


async def test_a_joiner_outlives_the_loss_of_the_trainer(make: Make) -> None:
    c = await make()
    trainer = await c.trainer()
    await sync(trainer, 0, {})
    trainer.silence("send")
    late = await c.member("late")
    await c.waits_for("transferring", "trainer")
    await late.expect("join", "load")
    await trainer.expect("form", "send")
    await trainer.close()
    await c.idle()
    trainer.answers.clear()
    await trainer.connect()
    await trainer.expect("welcome", "form", "send", "canary")
    assert (await late.expect("join", "load", "resume"))[-1].version == 0


@pytest.mark.parametrize("when", ["pause", "join", "load"])
async def test_a_member_that_goes_away_is_expired(make: Make, when: str) -> None:
    c = await make(sync={"pause_timeout_s": 1.0})
    a, b, trainer = await two(c, version=0)
    c.ledger.run(ops.issue(0, [b"prompt"], end=False))
    assert c.ledger.run(ops.take("b", 0, 1)).status is TakeStatus.OK
    newcomer = await c.member("c")  # so that the next round forms a group
    await newcomer.expect("join", "load", "resume")
    await trainer.expect("form", "send", "canary")
    b.answers[when] = hang_up
    trainer.begin(1)
    heard = {"pause": FIRST, "join": ("pause", "join", *FIRST[1:]), "load": (*FIRST[:3], *FIRST[1:])}[when]
    for member in (a, newcomer):
        joins = [command for command in await member.expect(*heard) if isinstance(command, pb.JoinGroup)]
        assert joins[-1].rendezvous.world_size == 3
        assert len({join.rendezvous.epoch for join in joins}) == len(joins)
    stats = c.stats()
    assert stats.members == {"a": 1, "c": 1}
    assert (stats.requeued, stats.in_flight_by_owner) == ({"expired": 1}, {})
    assert b.unread == [*FIRST[: FIRST.index(when) + 1]]
    b = Member(c.address, "b")
    c.peers.append(b)
    await b.connect()
    await b.expect("expelled")
    assert await b.ended() is grpc.StatusCode.OK


async def test_a_lost_stream_may_come_back_while_others_pause(make: Make) -> None:
    c = await make()
    a, b, trainer = await two(c, version=0)
    b.answers["pause"] = hang_up
    trainer.begin(1)
    await b.expect("pause")
    await b.ended()
    b.answers.clear()
    await b.connect()
    await b.expect("welcome", *REUSED)
    await a.expect(*REUSED)
    await trainer.expect("send", "committed", "canary", "canary")


async def test_a_failure_that_passes_costs_an_attempt_and_nobody(make: Make) -> None:
    c = await make()
    a, b, trainer = await two(c)

    def once(command: pb.MemberCommand) -> dict[str, Any]:
        del b.answers["load"]
        return b.failed(command, command.load.session)

    b.answers["load"] = once
    heard = (*FIRST[:3], *FIRST[1:])
    await sync(trainer, 0, {a: heard, b: heard}, attempts=2)
    first, second = [command.join for command in a.heard if command.HasField("join")]
    assert second.rendezvous.epoch > first.rendezvous.epoch
    assert second.session > first.session
    assert c.stats().members == {"a": 0, "b": 0}


async def test_other_weights_than_the_trainers_are_never_resumed(make: Make) -> None:
    c = await make()
    a, b, trainer = await two(c)
    b.answers["load"] = lambda command: b.loaded(command, "another")
    trainer.begin(0)
    await a.expect(*FIRST)
    *_, expelled = await b.expect("pause", "join", "load", "expelled")
    assert expelled.reason == "received other weights than the trainer sent"
    _, _, committed, _ = await trainer.expect("form", "send", "committed", "canary")
    assert committed.members == 1


@pytest.mark.parametrize("what", ["pause", "join", "load"])
async def test_a_silent_member_is_expired_and_stays_out(make: Make, what: str) -> None:
    c = await make(sync={"pause_timeout_s": 2.0, "rendezvous_timeout_s": 0.1, "transfer_timeout_s": 2.0})
    a, b, trainer = await two(c)
    b.silence(what)
    phase = {"pause": "pausing", "join": "forming", "load": "transferring"}[what]
    trainer.begin(0)
    await c.waits_for(phase, "b")
    *_, expelled = await b.expect(*FIRST[: FIRST.index(what) + 1], "expelled")
    assert "did not" in expelled.reason
    assert await b.ended() is grpc.StatusCode.OK  # whether it listens or not
    await a.expect(
        *{"pause": FIRST, "join": ("pause", "join", *FIRST[1:]), "load": (*FIRST[:3], *FIRST[1:])}[what]
    )
    assert c.stats().members == {"a": 0}
    trainer.begin(1)
    await a.expect(*REUSED)
    assert c.stats().members == {"a": 1}


@pytest.mark.parametrize("alone", [True, False])
async def test_a_trainer_that_cannot_send(make: Make, alone: bool) -> None:
    """Two attempts with the members, and one without them: it commits when that much works."""
    c = await make(sync={"max_attempts": 2})
    a, b, trainer = await two(c)
    sends = iter([False, False, alone])
    trainer.answers["send"] = lambda command: (
        trainer.proper("send", command) if next(sends) else trainer.failed(command)
    )
    trainer.begin(0)
    for member in (a, b):
        *_, expelled = await member.expect("pause", *["join", "load"] * 2, "expelled")
        assert expelled.reason == "no transfer in 2 attempts"
    *_, last = await trainer.expect(*["form", "send"] * 3, "committed" if alone else "rejected")
    if alone:
        assert (last.members, last.attempts) == (0, 3)
    else:
        assert "cannot send" in last.reason
    assert c.stats().version == (0 if alone else -1)


async def test_one_that_leaves_is_not_waited_for(make: Make) -> None:
    c = await make(sync={"pause_timeout_s": 300.0})
    a, b, trainer = await two(c, version=0)
    b.silence("pause")
    trainer.begin(1)
    await b.expect("pause")
    b.report(leaving=pb.MemberLeaving())
    await a.expect(*FIRST)
    await b.ended()
    assert c.stats().members == {"a": 1}


async def test_another_nccl_is_refused_by_name_before_a_group_is_made(make: Make) -> None:
    """Whoever comes first: the trainer finds a member of another version, or the member the trainer."""
    c = await make()
    good = await c.member("good", nccl="2.30.7")
    early = await c.member("early", nccl="2.29.7")
    trainer = await c.trainer(nccl="2.30.7")
    late = Member(c.address, "late")  # of another transport: it loads no NCCL
    c.peers.append(late)
    await late.connect()
    for member, version in ((early, "2.29.7"), (late, "missing")):
        (expelled,) = await member.expect("expelled")
        assert f"NCCL {version} here, 2.30.7 at the trainer" in expelled.reason
        assert "build both images from one release" in expelled.reason
        await member.ended()
    await sync(trainer, 0, {good: FIRST})
    assert c.stats().members == {"good": 0}
    await early.connect()  # it has to start anew, as another incarnation
    (expelled,) = await early.expect("expelled")
    assert (early.unread, late.unread) == ([], [])


async def test_draining_is_judged_by_tokens(make: Make) -> None:
    c = await make(async_training={"staleness_threshold": 0}, sync={"drain_stall_s": 1.5})
    a, b, trainer = await two(c, version=0)
    a.silence("pause")
    b.silence("pause")
    trainer.begin(1)
    (pause,) = await a.expect("pause")
    assert pause.finish_through == 0, "everything of the committed version ends first"
    await b.expect("pause")

    async def generate() -> None:
        for tokens in range(1, 31):
            a.report(progress=pb.MemberProgress(tokens=tokens, running=1))
            await asyncio.sleep(0.1)

    await generate()  # for twice the time that may pass without a token
    assert list((await c.status()).waiting_for) == ["a", "b"]
    a.answer("pause")
    *_, expelled = await b.expect("expelled")
    assert expelled.reason == "did not pause in time"
    await a.expect("join", "load", "resume")


async def test_a_round_waits_for_validation_but_not_for_ever(make: Make) -> None:
    c = await make(val={"max_delay_s": 1.0})
    a, b, trainer = await two(c)
    c.ledger.run(ops.val_load([(0, b"row")]))
    trainer.begin(0, validate=True)
    await a.expect(*FIRST)
    await b.expect(*FIRST)
    assert c.ledger.run(ops.val_status()).open
    await trainer.expect("form", "send", "committed", "canary", "canary")
    await sync(trainer, 1, {a: REUSED, b: REUSED})
    status = c.ledger.run(ops.val_status())
    assert (status.version, status.done, status.open) == (0, 0, False)


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


async def test_one_that_was_expired_while_it_lived_is_taken_in_between_rounds(make: Make) -> None:
    """Its lease ended while it was frozen. The trainer waits for samples: no round would take it in."""
    c = await make()
    a, b, trainer = await two(c, version=0)
    b.silence("pause")  # it is frozen still
    c.ledger.run(ops.expire("b", "as the janitor does"))
    (pause,) = await b.expect("pause")
    assert pause.drop_work, "what it was doing is others' by now"
    await sync(trainer, 1, {a: ("pause", "join", "load", "resume")})  # nobody waits for it meanwhile
    assert c.stats().members == {"a": 1}
    b.answers.clear()  # it wakes up
    b.answer("pause")
    (_, _, resume) = await b.expect("join", "load", "resume")
    assert resume.version == 1
    await trainer.expect("form", "send", "canary")
    assert c.stats().members == {"a": 1, "b": 1}
    trainer.begin(2)
    for member in (a, b):
        (pause, *_) = await member.expect(*FIRST)
        assert not pause.drop_work, "a member keeps its work over a sync"


async def test_one_that_was_expired_right_after_its_resume_is_paused_before_it_is_sent_weights(
    make: Make,
) -> None:
    """It may be generating, though it has not said yet that it has resumed."""
    c = await make()
    a, b, trainer = await two(c, version=0)
    b.silence("resume")
    trainer.begin(1)
    await a.expect(*REUSED)
    await b.expect(*REUSED)
    await trainer.expect("send", "committed", "canary")
    assert c.stats().members == {"a": 1, "b": 1}
    c.ledger.run(ops.expire("b", "as the janitor does"))
    (pause, *_) = await b.expect("pause", "join", "load", "resume")
    assert pause.drop_work
    assert c.stats().members == {"a": 1, "b": 1}


async def test_a_catch_up_that_takes_too_long_names_whom_it_waited_for(make: Make) -> None:
    c = await make(sync={"transfer_timeout_s": 0.5})
    trainer = await c.trainer()
    await sync(trainer, 0, {})
    late = await c.member("late")
    late.silence("load")
    (*_, expelled) = await late.expect("join", "load", "expelled")
    assert expelled.reason == "did not load the weights within 0.5 s"


async def test_a_group_that_the_trainer_has_left_is_not_used_again(make: Make) -> None:
    """A catch-up that came too late: the snapshot is another version by now, and its group is gone."""
    c = await make()
    trainer = await c.trainer()
    await sync(trainer, 0, {})
    trainer.answers["send"] = lambda command: {
        "failed": pb.TrainerFailed(
            term=command.term, session=command.send.session, error="moved on", moved_on=True
        )
    }
    late = await c.member("late")
    await late.expect("join", "load")
    await trainer.expect("form", "send")
    del trainer.answers["send"]
    await sync(trainer, 1, {late: FIRST})
