"""Runs sessions: puts the state machine's actions on the wire and its events into the machine.

One session at a time. Everything that must survive is in the ledger; a coordinator that starts anew
takes the next term, and receivers refuse what an older one still sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

from headrace.config import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.replies import CommitStatus
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator import metrics
from headrace_coordinator import session as s
from headrace_coordinator.connections import MemberConnection, TrainerConnection

log = logging.getLogger("headrace.coordinator")

_RENDEZVOUS_GRACE_S = 5.0
"""The coordinator waits a little longer than the ranks themselves, so that their own error comes first."""


@dataclass
class Group:
    """The weight group that the trainer and some members share."""

    epoch: int
    members: tuple[str, ...]


@dataclass
class Timings:
    began: float = field(default_factory=time.monotonic)
    paused: float = 0.0
    transferred: float = 0.0


class Driver:
    def __init__(self, config: RunConfig, ledger: AsyncLedger) -> None:
        self.config = config
        self.ledger = ledger
        self.term = 0
        self.version = -1
        self.round = 0
        self.lineage = 0
        self.members: set[str] = set()
        self.connections: dict[str, MemberConnection] = {}
        self.trainer: TrainerConnection | None = None
        self.pending: pb.BeginSync | None = None
        self.session: s.Session | None = None
        self.last_committed: pb.Committed | None = None
        self._canary: pb.Canary | None = None
        self._manifest: pb.Manifest | None = None
        self._expelled: set[str] = set()
        self._group: Group | None = None
        self._session_id = 0
        self._events: asyncio.Queue[s.Event] = asyncio.Queue()
        self._wake = asyncio.Event()
        self._progress_at = 0.0

    async def recover(self) -> None:
        """Take the next term and read what the ledger knows. The first act of every start."""
        found = await self.ledger.run(ops.open_term())
        self.term, self.version = found.term, found.version
        self.round, self.lineage = found.round, found.lineage
        stats = await self.ledger.run(ops.stats())
        self.members = set(stats.members)
        metrics.POLICY_VERSION.set(self.version)
        log.info("term opened", extra={"term": self.term, "version": self.version, "phase": str(found.phase)})

    # -- what the streams report -----------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    def event(self, event: s.Event) -> None:
        if self.session is not None:
            self._events.put_nowait(event)

    async def member_joined(self, connection: MemberConnection) -> None:
        name = connection.incarnation
        if name in self._expelled:
            self._send(connection, pb.MemberCommand(expelled=pb.Expelled(reason="expired earlier")))
            return
        self.connections[name] = connection
        self._send(connection, pb.MemberCommand(welcome=pb.MemberWelcome(committed_version=self.version)))
        stats = await self.ledger.run(ops.stats())
        self.members = set(stats.members)
        if self.session is not None:
            if self.session.phase is s.Phase.PAUSING and name in self.session.roster:
                self._pause(name)
        elif name in self.members and connection.paused and connection.version == self.version:
            self._send(
                connection, pb.MemberCommand(resume=pb.Resume(version=self.version, canary=self._canary))
            )
        self.wake()

    def member_left(self, connection: MemberConnection) -> None:
        if self.connections.get(connection.incarnation) is connection:
            del self.connections[connection.incarnation]
            self.event(s.Lost(connection.incarnation))
            self.wake()

    async def member_leaving(self, connection: MemberConnection) -> None:
        """An orderly leave: its work is parked already."""
        await self._expire(connection.incarnation, "left")
        self.member_left(connection)

    def trainer_joined(self, connection: TrainerConnection, manifest: pb.Manifest) -> bool:
        """False when a newer lineage is known. `manifest` is that of `connection.snapshot_version`."""
        current = self.trainer
        if connection.lineage < self.lineage or (current and connection.lineage < current.lineage):
            return False
        if current is not None:
            current.outgoing.put_nowait(None)  # a stream that was superseded ends
            self.event(s.TrainerLost())
        self.trainer = connection
        self.lineage = connection.lineage
        self.pending = None
        self._group = None
        if connection.snapshot_version >= 0:
            self._manifest, self._canary = manifest, manifest.canary
        self._send_trainer(pb.TrainerCommand(welcome=pb.TrainerWelcome(committed_version=self.version)))
        self.wake()
        return True

    def trainer_left(self, connection: TrainerConnection) -> None:
        if self.trainer is connection:
            self.trainer = None
            self.pending = None
            self._group = None
            self.event(s.TrainerLost())
            log.warning("trainer stream ended")

    def begin(self, connection: TrainerConnection, request: pb.BeginSync) -> None:
        if self.trainer is not connection:
            return
        if request.version <= self.version:  # a repeat of an answered request, perhaps from before a restart
            done = self.last_committed or pb.Committed(version=self.version, round=self.round)
            connection.snapshot_version = self.version
            self._manifest, self._canary = request.manifest, request.manifest.canary
            self._send_trainer(pb.TrainerCommand(committed=done))
            return
        self.pending = request
        self.wake()

    def canary(self, connection: MemberConnection, report: pb.MemberResumed) -> None:
        connection.paused = False
        connection.version = report.version
        metrics.SYNC_LOGPROB_DIFF.set(report.canary_max_abs_diff)
        self._send_trainer(
            pb.TrainerCommand(
                canary=pb.CanaryReport(
                    version=report.version,
                    incarnation=connection.incarnation,
                    max_abs_diff=report.canary_max_abs_diff,
                )
            )
        )

    def progress(self, connection: MemberConnection, tokens: int) -> None:
        if tokens > connection.tokens:
            connection.tokens = tokens
            self._progress_at = time.monotonic()

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.pending is not None and self.trainer is not None:
                await self._round(self.pending)
                self.wake()
            elif (joiner := self._next_joiner()) is not None:
                await self._catch_up(joiner)
                self.wake()

    def joiners(self) -> list[str]:
        return [name for name in self.connections if name not in self.members]

    def _next_joiner(self) -> str | None:
        if self.trainer is None or self._manifest is None or self.session is not None:
            return None
        if self.trainer.snapshot_version != self.version:
            return None
        return next(iter(self.joiners()), None)

    async def _round(self, begin: pb.BeginSync) -> None:
        """From pause to resume. Leaves `pending` set only when the session was abandoned by a new trainer."""
        await self._let_validation_finish()
        if self.pending is not begin:
            return
        self.round += 1
        held = await self.ledger.run(ops.hold(self.term, self.round, begin.lineage))
        if held != "ok":
            self._reject(f"the ledger refused to hold round {self.round}: {held}")
            return
        stats = await self.ledger.run(ops.stats())
        self.members = set(stats.members)
        roster = sorted(self.members | set(self.connections))
        group = self._group
        session = s.Session(
            roster,
            self.config.sync.max_attempts,
            group_is_good=group is not None and list(group.members) == roster,
        )
        self._manifest, self._canary = begin.manifest, begin.manifest.canary
        clock = Timings()
        await self._drive(session, begin, clock)
        if session.phase is s.Phase.DONE:
            self._committed(begin, session, clock)
        elif self.pending is begin:
            # The trainer is still there: it could not send, or was refused. It has to start anew.
            self._reject(f"sync round {self.round} was abandoned: {session.why}")

    async def _catch_up(self, name: str) -> None:
        session = s.Session([name], max_attempts=1, catch_up=True)
        began = time.monotonic()
        await self._drive(session, None, Timings())
        log.info(
            "catch-up ended",
            extra={"member": name, "phase": str(session.phase), "seconds": time.monotonic() - began},
        )
        if session.phase is s.Phase.DONE and (connection := self.connections.get(name)):
            self._resume(connection)

    async def _drive(self, session: s.Session, begin: pb.BeginSync | None, clock: Timings) -> None:
        self._events = asyncio.Queue()
        self.session = session
        self._progress_at = time.monotonic()
        try:
            actions = session.start()
            phase, entered = s.Phase.PAUSING, time.monotonic()
            while True:
                for action in actions:
                    await self._act(session, action, begin)
                if session.phase is not phase:
                    now = time.monotonic()
                    if phase is s.Phase.PAUSING:
                        clock.paused = now
                    if session.phase is s.Phase.COMMITTING:
                        clock.transferred = now
                    entered, phase = now, session.phase
                if phase.ended:
                    return
                actions = session.on(await self._next_event(session, entered))
        finally:
            self.session = None

    async def _next_event(self, session: s.Session, entered: float) -> s.Event:
        c = self.config.sync
        interrupts = self.config.rule.interrupts
        while True:
            match session.phase:
                case s.Phase.PAUSING:
                    limit = c.pause_timeout_s if interrupts else c.drain_stall_s
                case s.Phase.FORMING:
                    limit = c.rendezvous_timeout_s + _RENDEZVOUS_GRACE_S
                case _:
                    limit = c.transfer_timeout_s
            # Work that is let finish is judged by the tokens that come, not by the clock.
            since = entered if interrupts else max(entered, self._progress_at)
            left = since + limit - time.monotonic()
            if left <= 0:
                log.warning(
                    "deadline", extra={"phase": str(session.phase), "waiting": sorted(session.waiting)}
                )
                return s.Deadline()
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._events.get(), min(left, 1.0))

    async def _act(self, session: s.Session, action: s.Action, begin: pb.BeginSync | None) -> None:
        match action:
            case s.Pause(who):
                self._pause(who)
            case s.Form(_, members):
                self._form(session, members)
            case s.Transfer(_, members):
                for name in members:
                    self._send_member(
                        name,
                        pb.MemberCommand(load=pb.Load(session=self._session_id, manifest=self._manifest)),
                    )
                self._send_trainer(pb.TrainerCommand(send=pb.Send(session=self._session_id)))
            case s.Expire(who, reason):
                metrics.SYNC_FAILURES.labels(reason="member").inc()
                await self._expire(who, reason)
            case s.Commit(members, digest):
                self._events.put_nowait(await self._commit(session, begin, members, digest))

    def _pause(self, name: str) -> None:
        self._send_member(
            name,
            pb.MemberCommand(pause=pb.MemberPause(round=self.round, interrupt=self.config.rule.interrupts)),
        )

    def _form(self, session: s.Session, members: tuple[str, ...]) -> None:
        self._session_id += 1
        trainer = self.trainer
        if trainer is None:
            return  # TrainerLost is on its way
        workers = {name: c.workers for name in members if (c := self.connections.get(name))}
        rendezvous = pb.Rendezvous(
            host=trainer.store_host,
            port=trainer.store_port,
            epoch=self.term * 1_000_000 + self._session_id,
            world_size=1 + sum(workers.values()),
            transport=self.config.sync.transport,
            timeout_s=self.config.sync.rendezvous_timeout_s,
        )
        self._group = Group(rendezvous.epoch, members)
        rank = 1
        for name in members:
            join = pb.JoinGroup(session=self._session_id, rendezvous=rendezvous, rank_offset=rank)
            self._send_member(name, pb.MemberCommand(join=join))
            rank += workers.get(name, 0)
            if name not in workers:
                self._events.put_nowait(s.Lost(name))
        self._send_trainer(
            pb.TrainerCommand(form=pb.FormGroup(session=self._session_id, rendezvous=rendezvous))
        )

    async def _commit(
        self, session: s.Session, begin: pb.BeginSync | None, members: tuple[str, ...], digest: str
    ) -> s.CommitAnswer:
        if begin is None:  # catch-up: compare-and-set on the version that was sent
            answer = await self.ledger.run(ops.admit(self.term, members[0], self.version))
            if answer == "ok":
                self.members.add(members[0])
            return s.CommitAnswer(answer == "ok", f"admission refused: {answer}")
        reply = await self.ledger.run(
            ops.commit(
                self.term,
                self.round,
                begin.lineage,
                begin.version,
                digest,
                list(members),
                begin.validate,
                begin.final,
            )
        )
        if reply.status is not CommitStatus.OK:
            return s.CommitAnswer(False, f"commit of version {begin.version} refused: {reply}")
        self.version = begin.version
        self.members = set(members)
        return s.CommitAnswer(True)

    # -- ends ------------------------------------------------------------------------------------

    def _committed(self, begin: pb.BeginSync, session: s.Session, clock: Timings) -> None:
        for name in session.roster:
            if connection := self.connections.get(name):
                self._resume(connection)
        now = time.monotonic()
        self.last_committed = pb.Committed(
            version=self.version,
            round=self.round,
            pause_s=clock.paused - clock.began,
            transfer_s=clock.transferred - clock.paused,
            commit_s=now - clock.transferred,
            total_s=now - clock.began,
            members=len(session.roster),
            attempts=session.attempt,
        )
        self.pending = None
        if self.trainer is not None:
            self.trainer.snapshot_version = self.version
        self._send_trainer(pb.TrainerCommand(committed=self.last_committed))
        metrics.observe_round(self.last_committed, begin.manifest.bytes)
        log.info(
            "committed",
            extra={
                "version": self.version,
                "round": self.round,
                "members": session.roster,
                "total_s": round(self.last_committed.total_s, 4),
                "attempts": session.attempt,
            },
        )

    def _resume(self, connection: MemberConnection) -> None:
        connection.version = self.version
        self._send(connection, pb.MemberCommand(resume=pb.Resume(version=self.version, canary=self._canary)))

    def _reject(self, reason: str) -> None:
        self.pending = None
        metrics.SYNC_FAILURES.labels(reason="abandoned").inc()
        log.error("sync rejected", extra={"reason": reason})
        self._send_trainer(pb.TrainerCommand(rejected=pb.Rejected(reason=reason)))

    async def _expire(self, name: str, reason: str) -> None:
        reply = await self.ledger.run(ops.expire(name, reason))
        self.members.discard(name)
        self._expelled.add(name)
        log.warning("member expired", extra={"member": name, "reason": reason, "reply": str(reply)[:300]})
        self._send_member(name, pb.MemberCommand(expelled=pb.Expelled(reason=reason)))

    async def _let_validation_finish(self) -> None:
        """The commit waits for a running validation, but no longer than `val.max_delay_s`."""
        deadline = time.monotonic() + self.config.val.max_delay_s
        while (status := await self.ledger.run(ops.val_status())).open:
            if time.monotonic() > deadline or (not self.connections and status.done == 0):
                log.warning("validation unfinished", extra={"version": status.version, "done": status.done})
                await self.ledger.run(ops.val_close(status.version))
                return
            await asyncio.sleep(0.05)

    # -- sending ---------------------------------------------------------------------------------

    def _send(self, connection: MemberConnection, command: pb.MemberCommand) -> None:
        command.term = self.term
        connection.outgoing.put_nowait(command)

    def _send_member(self, name: str, command: pb.MemberCommand) -> None:
        if connection := self.connections.get(name):
            self._send(connection, command)

    def _send_trainer(self, command: pb.TrainerCommand) -> None:
        if self.trainer is not None:
            command.term = self.term
            self.trainer.outgoing.put_nowait(command)

    def attempt_of(self, session_id: int) -> int | None:
        """The running session's attempt that `session_id` names; None for anything older."""
        if self.session is None or session_id != self._session_id:
            return None
        return self.session.attempt
