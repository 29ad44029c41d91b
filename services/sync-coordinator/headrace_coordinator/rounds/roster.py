"""Decides who takes part in rounds, from the ledger, which is authoritative, and from pods about to go."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.replies import Stats
from headrace_coordinator.connections import Connections, MemberConnection, other_nccl
from headrace_coordinator.rounds.notices import Fenced, Notices
from headrace_coordinator.rounds.round_state import RoundState

log = logging.getLogger("headrace.coordinator")

LEFT = "left"
"""Reason for expiring an incarnation that left in an orderly way."""


def replica_of(incarnation: str) -> str:
    """The REPLICA of `rollouter-REPLICA-1f2e3d4c`, which is one start of it. In a cluster: the pod's name."""
    return incarnation.removeprefix("rollouter-").rpartition("-")[0]


class CoordinatorSuperseded(RuntimeError):
    """A newer coordinator has taken over. This one must end."""


class Roster:
    def __init__(
        self, ledger: AsyncLedger, connections: Connections, state: RoundState, notices: Notices
    ) -> None:
        self._ledger = ledger
        self._connections = connections
        self._state = state
        self._notices = notices
        self._lineage = -1
        """Lineage as of the last read. A new one starts without members."""
        self._expelled: set[str] = set()
        self.leaving: frozenset[str] = frozenset()
        """Replicas whose pods are about to go. They are no longer admitted."""

    @property
    def members(self) -> set[str]:
        """The members as of the last read of the ledger."""
        return self._connections.taking_part

    async def read(self) -> Stats:
        """Read the members from the ledger, which expires those whose lease has ended, and all members at a
        new lineage. Raises CoordinatorSuperseded."""
        stats = await self._ledger.run(ops.stats())
        term = self._connections.term
        if stats.term > term:
            raise CoordinatorSuperseded(
                f"term {term} is over, {stats.term} has begun: another coordinator runs"
            )
        same_lineage = stats.lineage == self._lineage
        for name, connection in self._connections.members.items():
            if same_lineage and name in self.members and name not in stats.members:
                connection.unheard = True
                self._notices.tell(Fenced(name, "it gave no sign of life for a lease"))
        self.committed(stats.members, stats.lineage)
        return stats

    def committed(self, members: Iterable[str], lineage: int) -> None:
        """Set the members to exactly these."""
        self._connections.taking_part, self._lineage = set(members), lineage

    def joiners(self) -> list[str]:
        return [name for name in self._connections.members if name not in self.members]

    def of_next_round(self) -> list[str]:
        """The members of the next round, in rank order."""
        return sorted(self.members | set(filter(self._can_join, self._connections.members)))

    def _can_join(self, name: str) -> bool:
        """Whether a round may wait for it: it is neither possibly frozen nor about to go."""
        return not self._connections.members[name].unheard and not self.is_leaving(name)

    def is_leaving(self, name: str) -> bool:
        return replica_of(name) in self.leaving

    def is_expelled(self, name: str) -> bool:
        return name in self._expelled

    async def expire(self, name: str, reason: str) -> None:
        """Expire an incarnation for good. Its further writes are refused."""
        reply = await self._ledger.run(ops.expire(name, reason, left=reason == LEFT))
        self.members.discard(name)
        self._expelled.add(name)
        log.warning("member expired", extra={"member": name, "reason": reason, "reply": str(reply)[:300]})
        if reason != LEFT:
            self._notices.tell(Fenced(name, reason))
        if connection := self._connections.members.get(name):
            self._connections.expel(connection, reason)

    async def refuse_other_nccl(self) -> None:
        """Refuse members with another NCCL that preceded the trainer. Later ones are refused on arrival."""
        for name, connection in list(self._connections.members.items()):
            if why := other_nccl(self._connections.trainer, connection):
                await self.expire(name, why)

    def resume(self, connection: MemberConnection) -> None:
        """Resume a member on the committed version, whose weights it has.

        Never without a canary: the engine's output would leave unverified. A restarted coordinator has none
        until the trainer reconnects. A new trainer's first round takes everybody in.
        """
        if (canary := self._state.canary) is not None:
            self._connections.resume(connection, self._state.version, canary)

    def resume_lost(self, stats: Stats) -> None:
        """Resume members that are paused although no round runs: their resume got lost.

        Not during a round: before its commit an engine may hold any weights.
        """
        if stats.phase == "idle" and not stats.held:
            for name, connection in self._connections.members.items():
                if connection.paused and name in stats.members:
                    self.resume(connection)

    def resume_if_lost(self, connection: MemberConnection, stats: Stats) -> None:
        """Resume a member that a commit has counted but that is still paused under an older version.

        It needs this before the next pause, which may wait for work that it holds frozen.
        """
        behind = connection.version < self._state.version and connection.incarnation in stats.members
        if connection.paused and behind:
            self.resume(connection)
