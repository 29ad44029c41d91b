"""Tracks the trainer's nodes and their current launch.

A launch is one start of every rank on every node, under an id that is used once. It begins when as many
launchers wait as the run has nodes. When it ends on one node it ends on all, since the other ranks could only
wait for those that do not come back. Its ranks meet at a store that the first node serves.

| event                                  | next                                                         |
|----------------------------------------|--------------------------------------------------------------|
| a launcher waits, all nodes are there  | a new launch of those that have waited longest               |
| it ended with 0 or 75 on a node        | the others end by themselves; that one waits for the next    |
| it ended otherwise on a node           | over: the others get an order to stop                        |
| a node's stream is lost for `GRACE_S`  | over: the others get an order to stop                        |
| a launcher comes back with its launch  | it continues, even after a restart of this process           |
| with one that is over                  | it gets an order to stop, and waits for the next             |

Nothing here survives a restart: the coordinator learns what runs from the launchers that reconnect. A launch
whose end this process has seen is not revived by a launcher that reconnects late.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.v1 import sync_pb2 as pb

log = logging.getLogger("headrace.coordinator")

GRACE_S = 10.0
"""Seconds that a stream may be lost: what a launcher needs to reconnect, with a margin."""
IN_ORDER = (0, 75)
"""Exit codes of ranks that completed (0) or were asked to stop (75)."""


@dataclass(eq=False)
class Node:
    """One stream of a launcher."""

    name: str
    store: str = ""
    """host:port where it would serve a launch's store."""
    outgoing: asyncio.Queue[pb.NodeCommand | None] = field(default_factory=asyncio.Queue)
    """None ends the stream."""

    def send(self, command: pb.NodeCommand) -> None:
        self.outgoing.put_nowait(command)


def _new_id() -> str:
    return uuid.uuid4().hex


class Launches:
    def __init__(
        self,
        nodes: int,
        grace_s: float = GRACE_S,
        new_id: Callable[[], str] = _new_id,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nodes = nodes
        self.launch = ""
        """Id of the running launch, or ""."""
        self._grace_s = grace_s
        self._new_id = new_id
        self._clock = clock
        self._waiting: dict[str, Node] = {}
        self._members: dict[str, Node | None] = {}
        """Nodes of the running launch by name. None: the node's stream is lost."""
        self._lost: dict[str, float] = {}
        """Time of loss by node. "" stands for nodes of an earlier coordinator that have not come back."""
        self._ended: set[str] = set()
        self._past: set[str] = set()
        """Ids of launches that are over."""

    def joined(self, node: Node, launch: str) -> None:
        """Handle a launcher's hello. `launch`: what runs there, or "" when it waits for one."""
        if launch and not self.launch and launch not in self._past:  # this process was restarted meanwhile
            self.launch = launch
            self._lose("")
        if launch:
            known = node.name in self._members or len(self._members) < self.nodes
            if launch != self.launch or not known:
                self._stop(node, f"launch {launch} is over")
                return
            self._supersede(self._members.get(node.name))
            self._members[node.name] = node
            self._lost.pop(node.name, None)
            if len(self._members) == self.nodes:
                self._lost.pop("", None)
            return
        self._supersede(self._waiting.pop(node.name, None))
        if node.name in self._members and node.name not in self._ended:
            self._over(f"{node.name} has lost its ranks")
        self._waiting[node.name] = node
        self._start()

    def ended(self, node: Node, code: int) -> None:
        """Handle the end of a node's ranks. `code`: the launcher's exit code for them."""
        node.outgoing.put_nowait(None)
        if self._members.get(node.name) is not node:
            return
        self._ended.add(node.name)
        if code not in IN_ORDER:
            self._over(f"the ranks of {node.name} ended with code {code}")
        elif len(self._ended) == self.nodes:
            self._clear()
            self._start()

    def left(self, node: Node) -> None:
        """Handle a lost stream. The ranks may be gone too."""
        if self._waiting.get(node.name) is node:
            del self._waiting[node.name]
        elif self._members.get(node.name) is node and node.name not in self._ended:
            self._members[node.name] = None
            self._lose(node.name)

    def look(self) -> None:
        """End the launch when a node has been lost for too long."""
        due = self._clock() - self._grace_s
        for name, since in self._lost.items():
            if since <= due:
                self._over(f"{name or 'a node'} has been out of reach for {self._grace_s:g} s")
                return

    # -- inside ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.launch:
            return
        if len(self._waiting) < self.nodes:
            wait = pb.NodeWait(present=sorted(self._waiting), nodes=self.nodes)
            for node in self._waiting.values():
                node.send(pb.NodeCommand(wait=wait))
            return
        chosen = list(self._waiting)[: self.nodes]
        self.launch = self._new_id()
        store = self._waiting[chosen[0]].store
        for number, name in enumerate(chosen):
            node = self._waiting.pop(name)
            self._members[name] = node
            start = pb.NodeStart(launch=self.launch, number=number, store=store)
            node.send(pb.NodeCommand(start=start))
        log.info("trainer launch", extra={"launch": self.launch, "nodes": chosen})

    def _over(self, reason: str) -> None:
        log.warning("trainer launch is over", extra={"launch": self.launch, "reason": reason})
        for name, node in self._members.items():
            if node is not None and name not in self._ended:
                self._stop(node, reason)
        self._clear()
        self._start()

    def _clear(self) -> None:
        self._past.add(self.launch)
        self.launch = ""
        self._members.clear()
        self._lost.clear()
        self._ended.clear()

    def _lose(self, name: str) -> None:
        self._lost[name] = self._clock()
        asyncio.get_running_loop().call_later(self._grace_s + 0.01, self.look)

    @staticmethod
    def _stop(node: Node, reason: str) -> None:
        node.send(pb.NodeCommand(stop=pb.NodeStop(reason=reason)))
        node.outgoing.put_nowait(None)

    @staticmethod
    def _supersede(node: Node | None) -> None:
        if node is not None:
            node.outgoing.put_nowait(None)
