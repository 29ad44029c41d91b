"""Membership, the policy version and the order of sessions: one at a time.

Everything that must survive is in the ledger; a coordinator that starts anew takes the next term, and
receivers refuse what an older one still sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time

from headrace.config import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.replies import CommitStatus, Stats
from headrace.trace import recorder
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator import metrics
from headrace_coordinator import session as s
from headrace_coordinator.connections import Connections, MemberConnection, TrainerConnection, other_nccl
from headrace_coordinator.notices import Committed, Fenced, Notices, SyncFailed
from headrace_coordinator.timings import Timings
from headrace_coordinator.transfers import Transfers
from headrace_coordinator.validation import let_finish

log = logging.getLogger("headrace.coordinator")

_MEMBERS_EVERY_S = 1.0
_REFUSED_WAIT_S = 5.0
_LONGEST_DIGEST = 256
"""Characters; a longer one is no digest."""


LEFT = "left"
"""Why an incarnation is expired that has taken its leave."""


def replica_of(incarnation: str) -> str:
    """`rollouter-REPLICA-1f2e3d4c` is one start of REPLICA; in a cluster that is the pod's name."""
    return incarnation.removeprefix("rollouter-").rpartition("-")[0]


class Superseded(RuntimeError):
    """A newer coordinator has taken over; this one must end."""


class Driver:
    def __init__(self, config: RunConfig, ledger: AsyncLedger) -> None:
        self.config = config
        self.ledger = ledger
        self.version = -1
        self.round = 0
        self.lineage = 0
        self._members_lineage = -1
        self.connections = Connections()
        self.transfers = Transfers(config, self.connections, self._expire)
        self.pending: pb.BeginSync | None = None
        self.last_committed: pb.Committed | None = None
        self._canary: pb.Canary | None = None
        self._manifest: pb.Manifest | None = None
        self._expelled: set[str] = set()
        self._wake = asyncio.Event()
        self._trace = recorder(config, "coordinator")
        self.tuning = pb.Tuning(sync_steps=config.rule.sync_steps, staleness_threshold=config.rule.threshold)
        """S and eta as they are wanted; the trainer takes them up, and its next round brings them back."""
        self.notices = Notices()
        self.leaving: frozenset[str] = frozenset()
        """Replicas whose pods are about to go: they are not taken in any more."""
        metrics.follow(config, self.connections)

    async def recover(self) -> None:
        """Take the next term and read what the ledger knows. The first act of every start."""
        found = await self.ledger.run(ops.open_term())
        self.connections.term, self.version = found.term, found.version
        self.round, self.lineage = found.round, found.lineage
        await self._read_members()
        metrics.POLICY_VERSION.set(self.version)
        log.info("term opened", extra={"term": self.term, "version": self.version, "phase": str(found.phase)})

    @property
    def term(self) -> int:
        return self.connections.term

    @property
    def members(self) -> set[str]:
        """Who takes part, by the last reading of the ledger."""
        return self.connections.taking_part

    @property
    def trainer(self) -> TrainerConnection | None:
        return self.connections.trainer

    @property
    def session(self) -> s.Session | None:
        return self.transfers.session

    # -- what the streams report -----------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    async def member_joined(self, connection: MemberConnection) -> None:
        name = connection.incarnation
        if name in self._expelled:
            self.connections.expel(connection, "expired earlier")
            return
        if why := other_nccl(self.trainer, connection):
            await self._expire(name, why)
            self.connections.expel(connection, why)
            return
        if (former := self.connections.members.get(name)) is not None:
            former.outgoing.put_nowait(None)  # a stream that was superseded ends
            self.transfers.event(s.Lost(name))
        self.connections.members[name] = connection
        welcome = pb.MemberWelcome(committed_version=self.version)
        self.connections.send(connection, pb.MemberCommand(welcome=welcome))
        stats = await self.ledger.run(ops.stats())
        if self.connections.members.get(name) is not connection:
            return
        if self.session is not None and name in self.session.roster:
            if self.session.phase is s.Phase.PAUSING:
                self._resume_if_lost(connection, stats)
                self.transfers.pause(name, self.round, self.version + 1)
        elif connection.paused and name in stats.members and stats.phase == "idle" and not stats.held:
            # Its resume got lost. In a round that has not committed its engine may hold anything.
            self._resume(connection)
        self.wake()

    def _resume_if_lost(self, connection: MemberConnection, stats: Stats) -> None:
        """A member that a commit has counted, and that still stands paused under an older version, needs its
        resume before the next pause: that one may wait for work which it holds frozen."""
        behind = connection.version < self.version and connection.incarnation in stats.members
        if connection.paused and behind:
            self._resume(connection)

    def member_left(self, connection: MemberConnection) -> None:
        if self.connections.members.get(connection.incarnation) is connection:
            del self.connections.members[connection.incarnation]
            self.transfers.event(s.Lost(connection.incarnation))
            self.wake()

    async def member_leaving(self, connection: MemberConnection) -> None:
        """An orderly leave: its work is parked already."""
        await self._gone(connection.incarnation, LEFT)

    async def replica_gone(self, replica: str) -> list[str]:
        """Its process is no more, for certain: take back what its incarnations had, without waiting for a
        lease. Returns those that still had something to lose; [] when it had left in order."""
        stats = await self.ledger.run(ops.stats())
        known = {*stats.members, *stats.in_flight_by_owner, *self.connections.members}
        gone = sorted(name for name in known if replica_of(name) == replica)
        for name in gone:
            await self._gone(name, "its pod is gone")
        return gone

    async def _gone(self, name: str, reason: str) -> None:
        await self._expire(name, reason)
        self.transfers.event(s.Left(name))
        self.wake()

    async def trainer_joined(self, connection: TrainerConnection, manifest: pb.Manifest) -> str:
        """Why it is not let in; "" when it is. `manifest` is that of `connection.snapshot_version`.

        A trainer opens its lineage in the ledger before it says hello: one that the ledger does not know is
        nobody's, and must not fence the trainer that is there.
        """
        known = (await self.ledger.run(ops.stats())).lineage
        if connection.lineage < (newest := max(known, self.lineage)):
            return f"lineage {connection.lineage} is older than {newest}"
        if connection.lineage > known:
            return f"lineage {connection.lineage} is not in the ledger, which is at {known}"
        if (current := self.trainer) is not None:
            current.outgoing.put_nowait(None)  # a stream that was superseded ends
            self.transfers.event(s.TrainerLost())
        self.connections.trainer = connection
        self.lineage = connection.lineage
        self.pending = None
        self.transfers.group = None
        if connection.snapshot_version >= 0:
            self._manifest, self._canary = manifest, manifest.canary
        welcome = pb.TrainerWelcome(committed_version=self.version, tuning=self.tuning)
        self.connections.send_trainer(pb.TrainerCommand(welcome=welcome))
        self.wake()
        return ""

    def trainer_left(self, connection: TrainerConnection) -> None:
        if self.trainer is connection:
            self.connections.trainer = None
            self.pending = None
            self.transfers.group = None
            self.transfers.event(s.TrainerLost())
            log.warning("trainer stream ended")

    def begin(self, connection: TrainerConnection, request: pb.BeginSync) -> None:
        if self.trainer is not connection:
            return
        if request.version <= self.version:  # a repeat of an answered request, perhaps from before a restart
            done = self.last_committed or pb.Committed(version=self.version, round=self.round)
            connection.snapshot_version = self.version
            self._manifest, self._canary = request.manifest, request.manifest.canary
            self.connections.send_trainer(pb.TrainerCommand(committed=done))
            self.wake()  # joiners can be served now
            return
        if request.lineage != connection.lineage or request.version != self.version + 1:
            self._reject(
                f"version {request.version} of lineage {request.lineage} cannot follow version "
                f"{self.version} of lineage {connection.lineage}"
            )
            return
        if self.pending is None or self.pending.optimizer_step != request.optimizer_step:
            self.pending = request
            self.wake()

    def paused(self, connection: MemberConnection, round_: int) -> None:
        connection.paused, connection.unheard = True, False
        if round_ == self.round:
            self.transfers.event(s.Paused(connection.incarnation))
        if connection.incarnation not in self.members:
            self.wake()

    def canary(self, connection: MemberConnection, report: pb.MemberResumed) -> None:
        connection.version = report.version
        metrics.CANARY.reported(report.version, report.canary_max_abs_diff)
        self.connections.send_trainer(
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
            self.transfers.progress()

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _MEMBERS_EVERY_S)
            self._wake.clear()
            await self._refuse_other_nccl()
            if self.pending is None:  # also when nobody is here: they may be with another coordinator
                await self._read_members()
            if self.pending is not None and self.trainer is not None:
                await self._round(self.pending)
                self.wake()
            elif (joiner := self._next_joiner()) is not None:
                await self._catch_up(joiner)

    async def _refuse_other_nccl(self) -> None:
        """Members that were here before the trainer; later ones are refused as they come."""
        for name, connection in list(self.connections.members.items()):
            if why := other_nccl(self.trainer, connection):
                await self._expire(name, why)

    async def _read_members(self) -> Stats:
        """Who takes part, by the ledger: it expires those whose lease has ended, and a new lineage all.

        Raises Superseded."""
        stats = await self.ledger.run(ops.stats())
        if stats.term > self.term:
            raise Superseded(f"term {self.term} is over, {stats.term} has begun: another coordinator runs")
        same_lineage = stats.lineage == self._members_lineage
        for name, connection in self.connections.members.items():
            if same_lineage and name in self.members and name not in stats.members:
                connection.unheard = True
                self.notices.tell(Fenced(name, "it gave no sign of life for a lease"))
        self.connections.taking_part, self._members_lineage = set(stats.members), stats.lineage
        return stats

    def joiners(self) -> list[str]:
        return [name for name in self.connections.members if name not in self.members]

    def _can_join(self, name: str) -> bool:
        """Nobody waits for one that may be frozen, or that is about to go."""
        return not self.connections.members[name].unheard and replica_of(name) not in self.leaving

    def _next_joiner(self) -> str | None:
        if self.trainer is None or self._manifest is None:
            return None
        if self.trainer.snapshot_version != self.version:  # a new lineage's first round takes in everybody
            return None
        ready = None
        for name in self.joiners():
            if replica_of(name) in self.leaving:
                continue
            connection = self.connections.members[name]
            if not connection.paused and not connection.asked_to_pause:
                connection.asked_to_pause = True
                self.transfers.pause(name, self.round, self.version)
            elif connection.paused and connection.not_before <= time.monotonic():
                ready = ready or name
        return ready

    async def _round(self, begin: pb.BeginSync) -> None:
        """From pause to resume. Leaves `pending` set only when it is another request by now."""
        await let_finish(self.ledger, self.config.val.max_delay_s, lambda: bool(self.connections.members))
        if self.pending is not begin:
            return
        self.round += 1
        held = await self.ledger.run(ops.hold(self.term, self.round, begin.lineage))
        stats = await self._read_members()
        if self.pending is not begin:  # the trainer went away, so there is nobody to wait for
            return
        if held != "ok":
            self._reject(f"the ledger refused to hold round {self.round}: {held}")
            return
        roster = sorted(self.members | set(filter(self._can_join, self.connections.members)))
        session = s.Session(
            roster,
            self.config.sync.max_attempts,
            group_is_good=self.transfers.group == tuple(roster),
        )
        for connection in self.connections.members.values():
            self._resume_if_lost(connection, stats)  # with the canary of the version that it has
        self._manifest, self._canary = begin.manifest, begin.manifest.canary
        clock = Timings()
        await self.transfers.run(
            session,
            self.round,
            begin.manifest,
            lambda members, digest: self._commit(begin, members, digest),
            clock,
        )
        if session.phase is s.Phase.DONE:
            self._committed(begin, session, clock)
        elif self.pending is begin:
            # The trainer is still there: it could not send, or was refused. It has to start anew.
            self._reject(f"sync round {self.round} was abandoned: {session.why}")

    async def _catch_up(self, name: str) -> None:
        session = s.Session([name], max_attempts=1, catch_up=True)
        began = time.monotonic()
        assert self._manifest is not None
        await self.transfers.run(session, self.round, self._manifest, self._admit, Timings())
        log.info(
            "catch-up ended",
            extra={
                "member": name,
                "phase": str(session.phase),
                "seconds": round(time.monotonic() - began, 3),
                **({"reason": session.why} if session.why else {}),
            },
        )
        if session.phase is s.Phase.DONE and (connection := self.connections.members.get(name)):
            self._resume(connection)
        elif connection := self.connections.members.get(name):
            connection.not_before = time.monotonic() + _REFUSED_WAIT_S
        if session.phase is s.Phase.DONE or name in self._expelled:
            self.wake()  # for the next joiner; one that was refused is in the next roster

    async def _admit(self, members: tuple[str, ...], digest: str) -> s.CommitAnswer:
        """Compare-and-set on the version that was sent."""
        answer = await self.ledger.run(ops.admit(self.term, members[0], self.version))
        if answer == "ok":
            self.members.add(members[0])
        return s.CommitAnswer(answer == "ok", f"admission refused: {answer}")

    async def _commit(self, begin: pb.BeginSync, members: tuple[str, ...], digest: str) -> s.CommitAnswer:
        reply = await self.ledger.run(
            ops.commit(
                self.term,
                self.round,
                begin.lineage,
                begin.version,
                digest[:_LONGEST_DIGEST],
                list(members),
                begin.validate,
                begin.final,
                self._max_required(begin.tuning),
            )
        )
        if reply.status is not CommitStatus.OK:
            return s.CommitAnswer(False, f"commit of version {begin.version} refused: {reply}")
        self.version = begin.version
        self.connections.taking_part, self._members_lineage = set(members), begin.lineage
        return s.CommitAnswer(True)

    def _max_required(self, tuning: pb.Tuning) -> int:
        """The gate's limit under the rule that the trainer has taken up; 0 when it says nothing."""
        if not tuning.sync_steps:
            return 0
        rule = dataclasses.replace(
            self.config.rule, sync_steps=tuning.sync_steps, threshold=tuning.staleness_threshold
        )
        return rule.max_required

    def tune(self, tuning: pb.Tuning) -> None:
        """S and eta change, for the trainer with its next snapshot, for the gate with the commit of that."""
        self.tuning = tuning
        self.connections.send_trainer(pb.TrainerCommand(tuning=tuning))

    # -- ends ------------------------------------------------------------------------------------

    def _committed(self, begin: pb.BeginSync, session: s.Session, clock: Timings) -> None:
        for name in session.roster:
            if connection := self.connections.members.get(name):
                self._resume(connection)
        clock.committed = time.monotonic()
        clock.draw(self._trace, self.version, self.round)
        self.last_committed = clock.report(self.version, self.round, len(session.roster), session.attempt)
        if self.trainer is not None and self.trainer.lineage == begin.lineage:
            self.pending = None
            self.trainer.snapshot_version = self.version
            self.connections.send_trainer(pb.TrainerCommand(committed=self.last_committed))
        metrics.observe_round(self.last_committed, begin.manifest.bytes)
        self.notices.tell(Committed(begin, len(session.roster)))
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
        # From here on it may be generating: it has to say that it has paused before it is sent anything.
        connection.paused = connection.asked_to_pause = False
        connection.version = self.version
        resume = pb.Resume(version=self.version, canary=self._canary)
        self.connections.send(connection, pb.MemberCommand(resume=resume))

    def _reject(self, reason: str) -> None:
        self.pending = None
        metrics.SYNC_FAILURES.labels(reason="abandoned").inc()
        log.error("sync rejected", extra={"reason": reason})
        self.notices.tell(SyncFailed(reason))
        self.connections.send_trainer(pb.TrainerCommand(rejected=pb.Rejected(reason=reason)))

    async def _expire(self, name: str, reason: str) -> None:
        reply = await self.ledger.run(ops.expire(name, reason, left=reason == LEFT))
        self.members.discard(name)
        self._expelled.add(name)
        log.warning("member expired", extra={"member": name, "reason": reason, "reply": str(reply)[:300]})
        if reason != LEFT:
            self.notices.tell(Fenced(name, reason))
        if connection := self.connections.members.get(name):
            self.connections.expel(connection, reason)
