"""The open streams: one per rollouter and one of the trainer. Every command carries the term."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace.v1 import sync_pb2 as pb


@dataclass
class MemberConnection:
    incarnation: str
    workers: int
    version: int
    paused: bool
    """It has reported a pause and has been sent no resume since. A rollouter that was expired while running
    is asked to pause and reports it when it can."""
    outgoing: asyncio.Queue[pb.MemberCommand | None] = field(default_factory=asyncio.Queue)
    """None ends the stream."""
    tokens: int = 0
    """Tokens generated so far: progress while a pause lets running work finish."""
    unheard: bool = False
    """Its lease expired though its stream is up, so it may be frozen. Reset when it reports a pause."""
    asked_to_pause: bool = False
    """Asked to pause outside of a round, so that it can be admitted again."""
    not_before: float = 0.0
    """Monotonic time before which a refused admission is not retried."""
    nccl: str = ""
    """The version that carries its weights; empty with another transport."""


@dataclass
class TrainerConnection:
    lineage: int
    store_host: str
    store_port: int
    outgoing: asyncio.Queue[pb.TrainerCommand | None] = field(default_factory=asyncio.Queue)
    snapshot_version: int = -1
    """The version that it can serve to late joiners."""
    nccl: str = ""


def other_nccl(trainer: TrainerConnection | None, member: MemberConnection) -> str:
    """Why the two cannot form a group, or "" if they can or there is no trainer yet.

    NCCL refuses peers of another version. A peer that reports none (another transport, an older image)
    matches only its like.
    """
    if trainer is None or trainer.nccl == member.nccl:
        return ""
    return (
        f"NCCL {member.nccl or 'missing'} here, {trainer.nccl or 'missing'} at the trainer: a weight group "
        "needs one version and one sync.transport; build both images from one release"
    )


class Connections:
    """Tracks who is connected and sends commands. Commands to absent peers are dropped."""

    def __init__(self) -> None:
        self.term = 0
        self.members: dict[str, MemberConnection] = {}
        """Connected rollouters by incarnation, members or not."""
        self.taking_part: set[str] = set()
        """The members as of the last read of the ledger. Other rollouters no longer own what they run."""
        self.trainer: TrainerConnection | None = None

    def send(self, connection: MemberConnection, command: pb.MemberCommand) -> None:
        command.term = self.term
        connection.outgoing.put_nowait(command)

    def send_member(self, name: str, command: pb.MemberCommand) -> bool:
        """Send a command. Returns False when the rollouter is not connected."""
        if (connection := self.members.get(name)) is None:
            return False
        self.send(connection, command)
        return True

    def send_trainer(self, command: pb.TrainerCommand) -> None:
        if self.trainer is not None:
            command.term = self.term
            self.trainer.outgoing.put_nowait(command)

    def resume(self, connection: MemberConnection, version: int, canary: pb.Canary) -> None:
        # From here on it may be generating. It must report a pause before weights are sent to it.
        connection.paused = connection.asked_to_pause = False
        connection.version = version
        self.send(connection, pb.MemberCommand(resume=pb.Resume(version=version, canary=canary)))

    def expel(self, connection: MemberConnection, reason: str) -> None:
        """Tell a rollouter that it was expired, and end its stream."""
        if self.members.get(connection.incarnation) is connection:
            del self.members[connection.incarnation]
        self.send(connection, pb.MemberCommand(expelled=pb.Expelled(reason=reason)))
        connection.outgoing.put_nowait(None)
