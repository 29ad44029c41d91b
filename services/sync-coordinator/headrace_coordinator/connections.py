"""The open streams: one per rollouter, one of the trainer."""

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
    outgoing: asyncio.Queue[pb.MemberCommand | None] = field(default_factory=asyncio.Queue)
    tokens: int = 0
    """Progress of running work while it is let finish: tokens generated so far."""


@dataclass
class TrainerConnection:
    lineage: int
    store_host: str
    store_port: int
    outgoing: asyncio.Queue[pb.TrainerCommand | None] = field(default_factory=asyncio.Queue)
    snapshot_version: int = -1
    """The version that it can serve to late joiners."""
