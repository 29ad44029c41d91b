"""Handles reports of the open streams: arrivals and departures, pauses, and the trainer's requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.metrics import coordinator as table
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator import metrics
from headrace_coordinator.connections import Connections, MemberConnection, TrainerConnection, other_nccl
from headrace_coordinator.rounds import session as s
from headrace_coordinator.rounds.notices import Notices, RoundFailedNotice
from headrace_coordinator.rounds.roster import LEFT, Roster, replica_of
from headrace_coordinator.rounds.round_state import RoundState
from headrace_coordinator.rounds.transfers import Transfers

log = logging.getLogger("headrace.coordinator")


class Reports:
    def __init__(
        self,
        ledger: AsyncLedger,
        connections: Connections,
        state: RoundState,
        roster: Roster,
        transfers: Transfers,
        notices: Notices,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called when there may be something to do for the driver."""
        self._ledger = ledger
        self.connections = connections
        self._state = state
        self._roster = roster
        self.transfers = transfers
        self.notices = notices
        self._wake = wake

    # -- members ---------------------------------------------------------------------------------

    async def member_joined(self, connection: MemberConnection) -> None:
        name = connection.incarnation
        if self._roster.is_expelled(name):
            self.connections.expel(connection, "expired earlier")
            return
        if why := other_nccl(self.connections.trainer, connection):
            await self._roster.expire(name, why)
            self.connections.expel(connection, why)
            return
        if (former := self.connections.members.get(name)) is not None:
            former.outgoing.put_nowait(None)  # end the superseded stream
            self.transfers.event(s.Lost(name))
        self.connections.members[name] = connection
        welcome = pb.MemberWelcome(committed_version=self._state.version)
        self.connections.send(connection, pb.MemberCommand(welcome=welcome))
        stats = await self._ledger.run(ops.stats())
        if self.connections.members.get(name) is not connection:
            return
        if (session := self.transfers.session) is not None and name in session.roster:
            if session.phase is s.Phase.PAUSING:
                self._roster.resume_if_lost(connection, stats)
                self.transfers.pause(name, self._state.round, self._state.version + 1)
        else:
            self._roster.resume_lost(stats)
        self._wake()

    def member_left(self, connection: MemberConnection) -> None:
        if self.connections.members.get(connection.incarnation) is connection:
            del self.connections.members[connection.incarnation]
            self.transfers.event(s.Lost(connection.incarnation))
            self._wake()

    async def member_leaving(self, connection: MemberConnection) -> None:
        """Handle an orderly departure. The member's work is parked already."""
        await self._gone(connection.incarnation, LEFT)

    async def replica_gone(self, replica: str) -> list[str]:
        """Reclaim the work of a replica whose process is certainly gone, without waiting for a lease.

        Returns those of its incarnations that still owned something, [] after an orderly departure.
        """
        stats = await self._ledger.run(ops.stats())
        known = {*stats.members, *stats.in_flight_by_owner, *self.connections.members}
        gone = sorted(name for name in known if replica_of(name) == replica)
        for name in gone:
            await self._gone(name, "its pod is gone")
        return gone

    async def _gone(self, name: str, reason: str) -> None:
        session = self.transfers.session
        if reason != LEFT and session is not None and name in session.roster:
            table.SYNC_FAILURES.labels(reason="member").inc()
        await self._roster.expire(name, reason)
        self.transfers.event(s.Left(name))
        self._wake()

    # -- trainer ---------------------------------------------------------------------------------

    async def trainer_joined(self, connection: TrainerConnection, manifest: pb.Manifest) -> str:
        """Handle a trainer's hello. Returns why it is refused, or "".

        `manifest`: of `connection.snapshot_version`. A trainer opens its lineage in the ledger before it says
        hello. One whose lineage the ledger does not know must not fence the current trainer.
        """
        stats = await self._ledger.run(ops.stats())
        known = stats.lineage
        if connection.lineage < (newest := max(known, self._state.lineage)):
            return f"lineage {connection.lineage} is older than {newest}"
        if connection.lineage > known:
            return f"lineage {connection.lineage} is not in the ledger, which is at {known}"
        if (current := self.connections.trainer) is not None:
            current.outgoing.put_nowait(None)  # end the superseded stream
            self.transfers.event(s.TrainerLost())
        self.connections.trainer = connection
        self._state.lineage = connection.lineage
        self._state.pending = None
        self.transfers.group = None
        if connection.snapshot_version >= 0:
            self._state.manifest = manifest
        welcome = pb.TrainerWelcome(committed_version=self._state.version, tuning=self._state.tuning)
        self.connections.send_trainer(pb.TrainerCommand(welcome=welcome))
        if self.transfers.session is None:
            self._roster.resume_lost(stats)  # it has brought the canary that they need
        self._wake()
        return ""

    def trainer_left(self, connection: TrainerConnection) -> None:
        if self.connections.trainer is connection:
            self.connections.trainer = None
            self._state.pending = None
            self.transfers.group = None
            self.transfers.event(s.TrainerLost())
            log.warning("trainer stream ended")

    def begin(self, connection: TrainerConnection, request: pb.BeginSync) -> None:
        if self.connections.trainer is not connection:
            return
        state = self._state
        if request.version <= state.version:  # a repeated request, perhaps from before a restart
            done = state.last_committed or pb.Committed(version=state.version, round=state.round)
            connection.snapshot_version = state.version
            state.manifest = request.manifest
            self.connections.send_trainer(pb.TrainerCommand(committed=done))
            self._wake()  # joiners can be served now
            return
        if request.lineage != connection.lineage or request.version != self._state.version + 1:
            self.reject(
                f"version {request.version} of lineage {request.lineage} cannot follow version "
                f"{self._state.version} of lineage {connection.lineage}"
            )
            return
        if self._state.pending is None or self._state.pending.optimizer_step != request.optimizer_step:
            self._state.pending = request
            self._wake()

    def paused(self, connection: MemberConnection, round_: int) -> None:
        connection.paused, connection.unheard = True, False
        if round_ == self._state.round:
            self.transfers.event(s.Paused(connection.incarnation))
        if connection.incarnation not in self._roster.members:
            self._wake()

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

    def reject(self, reason: str) -> None:
        self._state.pending = None
        table.SYNC_FAILURES.labels(reason="abandoned").inc()
        log.error("sync rejected", extra={"reason": reason})
        self.notices.tell(RoundFailedNotice(reason))
        self.connections.send_trainer(pb.TrainerCommand(rejected=pb.Rejected(reason=reason)))
