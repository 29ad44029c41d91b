"""Who takes part in rounds: by the ledger, which has the last word, and by whose pods are about to go."""

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
"""Why an incarnation is expired that has taken its leave."""


def replica_of(incarnation: str) -> str:
    """`rollouter-REPLICA-1f2e3d4c` is one start of REPLICA; in a cluster that is the pod's name."""
    return incarnation.removeprefix("rollouter-").rpartition("-")[0]


class CoordinatorSuperseded(RuntimeError):
    """A newer coordinator has taken over; this one must end."""


class Roster:
    def __init__(
        self, ledger: AsyncLedger, connections: Connections, state: RoundState, notices: Notices
    ) -> None:
        self._ledger = ledger
        self._connections = connections
        self._state = state
        self._notices = notices
        self._lineage = -1
        """Of the last reading: a new one has no members."""
        self._expelled: set[str] = set()
        self.leaving: frozenset[str] = frozenset()
        """Replicas whose pods are about to go: they are not taken in any more."""

    @property
    def members(self) -> set[str]:
        """Who takes part, by the last reading of the ledger."""
        return self._connections.taking_part

    async def read(self) -> Stats:
        """Who takes part, by the ledger: it expires those whose lease has ended, and a new lineage all.

        Raises Superseded."""
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
        """These, and only these, take part."""
        self._connections.taking_part, self._lineage = set(members), lineage

    def joiners(self) -> list[str]:
        return [name for name in self._connections.members if name not in self.members]

    def of_next_round(self) -> list[str]:
        """In order of ranks."""
        return sorted(self.members | set(filter(self._can_join, self._connections.members)))

    def _can_join(self, name: str) -> bool:
        """Nobody waits for one that may be frozen, or that is about to go."""
        return not self._connections.members[name].unheard and not self.is_leaving(name)

    def is_leaving(self, name: str) -> bool:
        return replica_of(name) in self.leaving

    def is_expelled(self, name: str) -> bool:
        return name in self._expelled

    async def expire(self, name: str, reason: str) -> None:
        """For good: what it still writes is refused."""
        reply = await self._ledger.run(ops.expire(name, reason, left=reason == LEFT))
        self.members.discard(name)
        self._expelled.add(name)
        log.warning("member expired", extra={"member": name, "reason": reason, "reply": str(reply)[:300]})
        if reason != LEFT:
            self._notices.tell(Fenced(name, reason))
        if connection := self._connections.members.get(name):
            self._connections.expel(connection, reason)

    async def refuse_other_nccl(self) -> None:
        """Members that were here before the trainer; later ones are refused as they come."""
        for name, connection in list(self._connections.members.items()):
            if why := other_nccl(self._connections.trainer, connection):
                await self.expire(name, why)

    def resume(self, connection: MemberConnection) -> None:
        """Onto the committed version, whose weights it has.

        Never without a canary: what the engine generates would leave unverified. A coordinator that has
        started anew has none until the trainer reconnects; a new trainer's first round takes everybody in.
        """
        if (canary := self._state.canary) is not None:
            self._connections.resume(connection, self._state.version, canary)

    def resume_lost(self, stats: Stats) -> None:
        """Members that stand paused though no round runs: their resume got lost. In a round that has not
        committed an engine may hold anything."""
        if stats.phase == "idle" and not stats.held:
            for name, connection in self._connections.members.items():
                if connection.paused and name in stats.members:
                    self.resume(connection)

    def resume_if_lost(self, connection: MemberConnection, stats: Stats) -> None:
        """A member that a commit has counted, and that still stands paused under an older version, needs its
        resume before the next pause: that one may wait for work which it holds frozen."""
        behind = connection.version < self._state.version and connection.incarnation in stats.members
        if connection.paused and behind:
            self.resume(connection)
