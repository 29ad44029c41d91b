"""The open streams: one per rollouter, one of the trainer. Every command carries the term."""

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
    """It has said so, and was sent no resume since. One that was expired while it ran, and is asked to pause,
    says so when it can."""
    outgoing: asyncio.Queue[pb.MemberCommand | None] = field(default_factory=asyncio.Queue)
    """None ends the stream."""
    tokens: int = 0
    """Progress of running work while it is let finish: tokens generated so far."""
    unheard: bool = False
    """Its lease ended though its stream is up: it may be frozen. Until it says that it has paused."""
    asked_to_pause: bool = False
    """Outside of a round, to be taken in again."""
    not_before: float = 0.0
    """Monotonic seconds: an admission that was refused is not tried again at once."""
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
    """Why the two can make no group: NCCL refuses peers of another version. "" when they can, or when there
    is no trainer yet. A peer that names none (another transport, an older image) fits only its like."""
    if trainer is None or trainer.nccl == member.nccl:
        return ""
    return (
        f"NCCL {member.nccl or 'missing'} here, {trainer.nccl or 'missing'} at the trainer: a weight group "
        "needs one version and one sync.transport; build both images from one release"
    )


class Connections:
    """Who is connected, and the sending. Nothing is sent to who is not there."""

    def __init__(self) -> None:
        self.term = 0
        self.members: dict[str, MemberConnection] = {}
        """Who is connected, whether it takes part or not."""
        self.taking_part: set[str] = set()
        """Who does, by the last reading of the ledger. What runs in others is not theirs any more."""
        self.trainer: TrainerConnection | None = None

    def send(self, connection: MemberConnection, command: pb.MemberCommand) -> None:
        command.term = self.term
        connection.outgoing.put_nowait(command)

    def send_member(self, name: str, command: pb.MemberCommand) -> bool:
        """False when it is not connected."""
        if (connection := self.members.get(name)) is None:
            return False
        self.send(connection, command)
        return True

    def send_trainer(self, command: pb.TrainerCommand) -> None:
        if self.trainer is not None:
            command.term = self.term
            self.trainer.outgoing.put_nowait(command)

    def resume(self, connection: MemberConnection, version: int, canary: pb.Canary) -> None:
        # From here on it may be generating: it has to say that it has paused before it is sent anything.
        connection.paused = connection.asked_to_pause = False
        connection.version = version
        self.send(connection, pb.MemberCommand(resume=pb.Resume(version=version, canary=canary)))

    def expel(self, connection: MemberConnection, reason: str) -> None:
        """Tell it that it was expired, and end its stream: it takes part in nothing any more."""
        if self.members.get(connection.incarnation) is connection:
            del self.members[connection.incarnation]
        self.send(connection, pb.MemberCommand(expelled=pb.Expelled(reason=reason)))
        connection.outgoing.put_nowait(None)
