"""Publishes what happens in the coordinator. Listeners are optional."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.v1 import sync_pb2 as pb


@dataclass(frozen=True)
class Committed:
    begin: pb.BeginSync
    members: int


@dataclass(frozen=True)
class RoundFailedNotice:
    reason: str


@dataclass(frozen=True)
class Fenced:
    """An incarnation was expired. Its further writes are refused."""

    incarnation: str
    reason: str


@dataclass(frozen=True)
class Tuned:
    """The configuration file has changed in a way that a running run can follow."""

    what: str


@dataclass(frozen=True)
class ConfigRefused:
    """The configuration file has changed in a way that a running run cannot follow."""

    reason: str


Notice = Committed | RoundFailedNotice | Fenced | Tuned | ConfigRefused


class Notices:
    def __init__(self) -> None:
        self._listeners: list[asyncio.Queue[Notice]] = []

    def listen(self, most: int = 1000) -> asyncio.Queue[Notice]:
        """Return a queue of all notices from now on. What does not fit is dropped."""
        queue: asyncio.Queue[Notice] = asyncio.Queue(most)
        self._listeners.append(queue)
        return queue

    def tell(self, notice: Notice) -> None:
        for queue in self._listeners:
            if not queue.full():
                queue.put_nowait(notice)
