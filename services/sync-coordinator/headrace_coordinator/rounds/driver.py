"""Runs sessions one at a time: rounds that the trainer asks for, else catch-ups of late joiners.

`reports` handles what the streams report, `roster` decides who takes part, `round_state` holds versions and
rounds, and `transfers` carries out a session. Everything that must survive is in the ledger. A restarted
coordinator takes the next term, and receivers refuse commands of an older term.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time

from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.replies import CommitStatus
from headrace.metrics import coordinator as table
from headrace.traces.service_recorder import recorder
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator import metrics
from headrace_coordinator.connections import Connections, TrainerConnection
from headrace_coordinator.rounds import session as s
from headrace_coordinator.rounds.notices import Committed, Notices
from headrace_coordinator.rounds.reports import Reports
from headrace_coordinator.rounds.roster import Roster
from headrace_coordinator.rounds.round_state import RoundState
from headrace_coordinator.rounds.timings import Timings
from headrace_coordinator.rounds.transfers import Transfers
from headrace_coordinator.rounds.validation import let_finish

log = logging.getLogger("headrace.coordinator")

_MEMBERS_EVERY_S = 1.0
_REFUSED_WAIT_S = 5.0
_LONGEST_DIGEST = 256
"""Most characters of a plausible digest."""


class Driver:
    def __init__(self, config: RunConfig, ledger: AsyncLedger) -> None:
        self.config = config
        self.ledger = ledger
        self.connections = Connections()
        rule = config.rule
        self.state = RoundState(
            tuning=pb.Tuning(sync_steps=rule.sync_steps, staleness_threshold=rule.threshold)
        )
        self.notices = Notices()
        self.roster = Roster(ledger, self.connections, self.state, self.notices)
        self.transfers = Transfers(config, self.connections, self.roster.expire)
        self.reports = Reports(
            ledger,
            self.connections,
            self.state,
            self.roster,
            self.transfers,
            self.notices,
            self.wake,
        )
        self._wake = asyncio.Event()
        self._trace = recorder(config, "coordinator")
        metrics.follow(config, self.connections)

    async def recover(self) -> None:
        """Take the next term and read the ledger's state. Call it first after every start."""
        found = await self.ledger.run(ops.open_term())
        self.connections.term, self.state.version = found.term, found.version
        self.state.round, self.state.lineage = found.round, found.lineage
        await self.roster.read()
        table.POLICY_VERSION.set(self.state.version)
        extra = {"term": found.term, "version": found.version, "phase": str(found.phase)}
        log.info("term opened", extra=extra)

    @property
    def term(self) -> int:
        return self.connections.term

    @property
    def trainer(self) -> TrainerConnection | None:
        return self.connections.trainer

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _MEMBERS_EVERY_S)
            self._wake.clear()
            await self.roster.refuse_other_nccl()
            if self.state.pending is None:  # also when nobody is here: they may be with another coordinator
                self.roster.resume_lost(await self.roster.read())
            if self.state.pending is not None and self.trainer is not None:
                await self._round(self.state.pending)
                self.wake()
            elif (joiner := self._next_joiner()) is not None:
                await self._catch_up(joiner)

    def _next_joiner(self) -> str | None:
        if self.trainer is None or self.state.manifest is None:
            return None
        if self.trainer.snapshot_version != self.state.version:
            return None  # a new lineage's first round takes in everybody
        ready = None
        for name in self.roster.joiners():
            if self.roster.is_leaving(name):
                continue
            connection = self.connections.members[name]
            if not connection.paused and not connection.asked_to_pause:
                connection.asked_to_pause = True
                self.transfers.pause(name, self.state.round, self.state.version)
            elif connection.paused and connection.not_before <= time.monotonic():
                ready = ready or name
        return ready

    async def _round(self, begin: pb.BeginSync) -> None:
        """Run one round from pause to resume. `pending` is left set only if it is a newer request."""
        await let_finish(self.ledger, self.config.val.max_delay_s, lambda: bool(self.connections.members))
        if self.state.pending is not begin:
            return
        self.state.round += 1
        held = await self.ledger.run(ops.hold(self.term, self.state.round, begin.lineage))
        stats = await self.roster.read()
        if self.state.pending is not begin:  # the trainer went away, so there is nobody to wait for
            return
        if held != "ok":
            self.reports.reject(f"the ledger refused to hold round {self.state.round}: {held}")
            return
        roster = self.roster.of_next_round()
        session = s.TransferSession(
            roster,
            self.config.sync.max_attempts,
            group_is_good=self.transfers.group == tuple(roster),
        )
        for connection in self.connections.members.values():
            self.roster.resume_if_lost(connection, stats)  # with the canary of the version that it has
        clock = Timings()
        await self.transfers.run(
            session,
            self.state.round,
            begin.manifest,
            lambda members, digest: self._commit(begin, members, digest),
            clock,
        )
        if session.phase is s.Phase.DONE:
            self._committed(begin, session, clock)
        elif self.state.pending is begin:
            # The trainer is connected but could not send, or was refused. It must restart.
            self.reports.reject(f"sync round {self.state.round} was abandoned: {session.why}")

    async def _catch_up(self, name: str) -> None:
        session = s.TransferSession([name], max_attempts=1, catch_up=True)
        began = time.monotonic()
        assert self.state.manifest is not None
        await self.transfers.run(session, self.state.round, self.state.manifest, self._admit, Timings())
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
            self.roster.resume(connection)
        elif connection := self.connections.members.get(name):
            connection.not_before = time.monotonic() + _REFUSED_WAIT_S
        if session.phase is s.Phase.DONE or self.roster.is_expelled(name):
            self.wake()  # for the next joiner; one that was refused is in the next roster

    async def _admit(self, members: tuple[str, ...], digest: str) -> s.CommitAnswer:
        """Admit a joiner, by compare-and-set on the version that was sent."""
        answer = await self.ledger.run(ops.admit(self.term, members[0], self.state.version))
        if answer == "ok":
            self.roster.members.add(members[0])
        return s.CommitAnswer(answer == "ok", f"admission refused: {answer}")

    async def _commit(self, begin: pb.BeginSync, members: tuple[str, ...], digest: str) -> s.CommitAnswer:
        reply = await self.ledger.run(
            ops.commit(
                self.term,
                self.state.round,
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
        self.state.version = begin.version
        # Only now: a member that missed its resume and reconnects during the round needs the old canary.
        self.state.manifest = begin.manifest
        self.roster.committed(members, begin.lineage)
        return s.CommitAnswer(True)

    def _max_required(self, tuning: pb.Tuning) -> int:
        """The gate's limit under the rule that the trainer has adopted, or 0 when it reports none."""
        if not tuning.sync_steps:
            return 0
        rule = dataclasses.replace(
            self.config.rule, sync_steps=tuning.sync_steps, threshold=tuning.staleness_threshold
        )
        return rule.max_required

    def tune(self, tuning: pb.Tuning) -> None:
        """Change S and eta: for the trainer with its next snapshot, for the gate when that commits."""
        self.state.tuning = tuning
        self.connections.send_trainer(pb.TrainerCommand(tuning=tuning))

    def _committed(self, begin: pb.BeginSync, session: s.TransferSession, clock: Timings) -> None:
        for name in session.roster:
            if connection := self.connections.members.get(name):
                self.roster.resume(connection)
        clock.committed = time.monotonic()
        clock.draw(self._trace, self.state.version, self.state.round)
        done = clock.report(self.state.version, self.state.round, len(session.roster), session.attempt)
        self.state.last_committed = done
        if self.trainer is not None and self.trainer.lineage == begin.lineage:
            self.state.pending = None
            self.trainer.snapshot_version = self.state.version
            self.connections.send_trainer(pb.TrainerCommand(committed=done))
        metrics.observe_round(done, begin.manifest.bytes)
        self.notices.tell(Committed(begin, len(session.roster)))
        log.info(
            "committed",
            extra={
                "version": self.state.version,
                "round": self.state.round,
                "members": session.roster,
                "total_s": round(done.total_s, 4),
                "attempts": session.attempt,
            },
        )
