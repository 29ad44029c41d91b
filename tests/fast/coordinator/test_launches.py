"""Launches of a trainer of several nodes: who starts together, and what ends a launch."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.launches import Launches, Node


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """Launchers of two nodes in front of a coordinator, with a clock that the test moves."""

    def __init__(self, nodes: int = 2) -> None:
        self.clock = Clock()
        numbers = itertools.count(1)
        self.launches = Launches(nodes, 10.0, lambda: f"L{next(numbers)}", self.clock)

    def join(self, name: str, launch: str = "") -> Node:
        node = Node(name, f"{name}:1")
        self.launches.joined(node, launch)
        return node

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.launches.look()


def told(node: Node) -> list[str]:
    """What it was told since the last time: wait, start:ID, stop, and `.` for the end of the stream."""
    out = []
    while not node.outgoing.empty():
        command: pb.NodeCommand | None = node.outgoing.get_nowait()
        if command is None:
            out.append(".")
        else:
            kind = str(command.WhichOneof("command"))
            out.append(f"start:{command.start.launch}" if kind == "start" else kind)
    return out


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture
async def pair(desk: Desk) -> tuple[Node, Node]:
    """Two nodes in launch L1."""
    a, b = desk.join("a"), desk.join("b")
    assert (told(a), told(b)) == (["wait", "start:L1"], ["start:L1"])
    return a, b


async def test_they_start_together_and_end_in_order(desk: Desk, pair: tuple[Node, Node]) -> None:
    a, b = pair
    desk.launches.ended(a, 0)
    assert (told(a), told(b)) == (["."], []), "it ends by itself"
    desk.launches.ended(b, 0)
    assert told(b) == ["."]
    again = desk.join("a"), desk.join("b")
    assert told(again[1]) == ["start:L2"], "an id is used once"


async def test_they_meet_at_the_store_of_the_first(desk: Desk) -> None:
    a, b = desk.join("a"), desk.join("b")
    told(b)
    assert desk.launches.launch == "L1"
    fresh = {"c": desk.join("c"), "d": desk.join("d")}
    for node in (a, b):
        desk.launches.ended(node, 75)
    for number, node in enumerate(fresh.values()):
        *_, command = [node.outgoing.get_nowait() for _ in range(node.outgoing.qsize())]
        assert command is not None
        assert command.start == pb.NodeStart(launch="L2", number=number, store="c:1")


async def test_one_failure_is_the_end_for_all(desk: Desk, pair: tuple[Node, Node]) -> None:
    a, b = pair
    desk.launches.ended(a, 1)
    assert (told(a), told(b)) == (["."], ["stop", "."])
    a, b = desk.join("a"), desk.join("b")
    assert (told(a), told(b)) == (["wait", "start:L2"], ["start:L2"])
    desk.launches.ended(a, 75)
    assert told(b) == [], "one that was told to stop lets the others save"


async def test_a_lost_stream_has_time_to_come_back(desk: Desk, pair: tuple[Node, Node]) -> None:
    a, b = pair
    desk.launches.left(a)
    desk.later(9.0)
    assert told(b) == []
    back = desk.join("a", "L1")
    desk.later(20.0)
    assert (told(back), told(b)) == ([], [])
    desk.launches.left(back)
    desk.launches.left(a)  # the end of the first stream, noticed late, means nothing
    replacement = desk.join("a2")
    assert told(replacement) == []
    desk.later(11.0)
    assert told(b) == ["stop", "."]
    assert told(desk.join("b")) == ["start:L2"]
    assert told(replacement) == ["wait", "start:L2"]


async def test_a_launcher_without_its_ranks_ends_the_launch(desk: Desk, pair: tuple[Node, Node]) -> None:
    fresh = desk.join("a")
    assert told(pair[1]) == ["stop", "."]
    assert told(fresh) == ["wait"]


async def test_who_has_ended_in_order_and_waits_again_leaves_the_others_their_time(
    desk: Desk, pair: tuple[Node, Node]
) -> None:
    a, b = pair
    desk.launches.ended(a, 75)
    assert told(a) == ["."]
    desk.launches.left(a)
    again = desk.join("a")
    assert (told(again), told(b)) == ([], []), "it is still saving"
    desk.launches.ended(b, 75)
    assert (told(again), told(b)) == (["wait"], ["."])
    assert told(desk.join("b2")) == ["start:L2"]
    assert told(again) == ["start:L2"]


async def test_a_coordinator_that_starts_anew_lets_ranks_run_on(desk: Desk) -> None:
    a = desk.join("a", "old")
    assert told(desk.join("b", "other")) == ["stop", "."], "there is one launch at a time"
    b = desk.join("b", "old")
    desk.later(60.0)
    assert (told(a), told(b), desk.launches.launch) == ([], [], "old")
    assert told(desk.join("c", "old")) == ["stop", "."]


async def test_a_launch_that_is_over_does_not_begin_again(desk: Desk, pair: tuple[Node, Node]) -> None:
    """Its stream was lost when the other one failed: it has not heard of the end."""
    a, b = pair
    desk.launches.left(b)
    desk.launches.ended(a, 1)
    late = desk.join("b", "L1")
    assert (told(late), desk.launches.launch) == (["stop", "."], "")
    desk.launches.ended(late, 143)
    assert told(desk.join("a")) == ["wait"]
    assert told(desk.join("b")) == ["start:L2"]


async def test_one_that_does_not_come_back_to_a_new_coordinator_is_not_waited_for(desk: Desk) -> None:
    a, fresh = desk.join("a", "old"), desk.join("b")
    desk.later(11.0)
    assert told(a) == ["stop", "."]
    assert told(desk.join("a")) == ["start:L1"]
    assert told(fresh) == ["wait", "start:L1"]


async def test_the_clock_runs_by_itself() -> None:
    launches = Launches(2, grace_s=0.01)
    a, b = Node("a"), Node("b")
    launches.joined(a, "")
    launches.joined(b, "")
    launches.left(a)
    async with asyncio.timeout(10):
        while (command := await b.outgoing.get()) is None or command.WhichOneof("command") != "stop":
            pass


async def test_a_spare_waits(desk: Desk, pair: tuple[Node, Node]) -> None:
    spare = desk.join("c")
    assert told(spare) == []
    desk.launches.ended(pair[0], 1)
    told(pair[1])
    assert told(desk.join("b")) == ["start:L2"]
    assert told(spare)[-1] == "start:L2"
