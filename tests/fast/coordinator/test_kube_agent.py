"""The coordinator's agent in a cluster: it survives its own errors, and takes nobody for gone who is not."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.run import RunConfig
from headrace.ledger.client import LedgerError
from headrace_coordinator.kube.agent import Agent
from headrace_coordinator.kube.api import DELETION_COST, ClusterError, Expired, Pod, to_pod
from headrace_coordinator.rounds.notices import Notices
from tests.fast.config.test_config import GOOD

CONFIG = RunConfig.model_validate(
    {
        **GOOD,
        "kubernetes": {"enable": True, "rollouter_deployment": "roll", "trainer_deployment": "train"},
    }
)
OLD, NEW = "roll-5d-old", "roll-5d-new"


def pod(name: str) -> Pod:
    return Pod(name, f"uid-{name}", leaving=False, ended=False, cost=None)


class FakeDriver:
    """Who is a member, as the ledger says, and who was told to be gone."""

    term = 1

    def __init__(self) -> None:
        self.state = SimpleNamespace(version=0)
        self.roster = self.reports = self
        self.notices = Notices()
        self.connections = SimpleNamespace(members={})
        self.ledger = self
        self.members: set[str] = set()
        self.gone: list[str] = []
        self.leaving: frozenset[str] = frozenset()
        self.ledger_errors = 0
        self.errors: list[Exception] = []

    async def run(self, _: Any) -> Any:
        if self.ledger_errors:
            self.ledger_errors -= 1
            raise LedgerError("away")
        members = {f"rollouter-{name}-00000001": 1 for name in self.members}
        return SimpleNamespace(members=members, in_flight_by_owner={}, completed=False, term=1)

    async def replica_gone(self, name: str) -> list[str]:
        if self.errors:
            raise self.errors.pop()
        self.gone.append(name)
        self.members.discard(name)
        return [name]


class FakeCluster:
    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.there: list[str] = []
        self.calls: Counter[str] = Counter()
        self.after_list: Callable[[], None] = lambda: None
        """What happens as soon as the first list is taken."""
        self.watch_errors: list[Exception] = []
        self.create_errors: list[Exception] = []
        self.watching = 0
        self.hidden: set[str] = set()
        """There, but not with the labels that the selector wants."""
        self.pod_errors: list[Exception] = []
        self.told: list[tuple[str, Pod]] = []
        """What a watch tells beside who is there."""
        self.short: list[Exception | None] = []
        """How the next watches end, at once; None: in order."""
        self.closed = threading.Event()

    def pod_selector(self, _: str) -> str:
        return "app=roll"

    def pods(self, _: str) -> tuple[list[Pod], str]:
        self.calls["pods"] += 1
        found = [pod(name) for name in self.there if name not in self.hidden]
        happen, self.after_list = self.after_list, lambda: None
        happen()
        return found, "1"

    def pod(self, name: str) -> Pod | None:
        if self.pod_errors:
            raise self.pod_errors.pop()
        return pod(name) if name in self.there else None

    def watch(self, _: str, version: str) -> Iterator[tuple[str, Pod]]:
        self.calls["watch"] += 1
        if self.watch_errors:
            raise self.watch_errors.pop()
        if self.short:
            if (error := self.short.pop()) is not None:
                raise error
            return
        self.watching += 1
        for name in list(self.there):
            if name not in self.hidden:
                yield "ADDED", pod(name)
        yield from self.told
        self.closed.wait(60)

    def create_event(self, name: str, *_: Any) -> None:
        self.calls["create"] += 1
        if self.create_errors:
            raise self.create_errors.pop()

    def count_event(self, name: str, count: int, at: datetime) -> None:
        self.calls["count"] += 1


class World:
    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.cluster = FakeCluster(self.driver)
        self.agent = Agent(CONFIG, self.driver, self.cluster)  # type: ignore[arg-type]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("headrace_coordinator.kube.agent._FIRST_PAUSE_S", 0.01)
    made = World()
    yield made
    made.cluster.closed.set()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def meanwhile(run: Awaitable[None], condition: Callable[[], Any]) -> None:
    """`run` goes on until `condition`, and is ended."""
    task = asyncio.ensure_future(run)
    await until(lambda: condition() or task.done())
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.wait({task})


async def test_an_error_of_its_own_ends_all_parts_and_it_can_begin_anew(world: World) -> None:
    world.driver.members, world.cluster.there = {OLD}, [NEW]
    world.driver.errors = [KeyError("unheard of")]
    with pytest.raises((ExceptionGroup, KeyError)):
        await world.agent.run()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "no part of it is left"
    await meanwhile(world.agent.run(), lambda: NEW in world.agent.pods and world.driver.gone == [OLD])


async def test_an_error_in_the_watching_thread_is_told_and_it_lists_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.cluster.watch_errors = [AttributeError("no such thing")]
    await meanwhile(world.agent.run(), lambda: world.cluster.watching)
    assert world.cluster.calls["pods"] == 2
    assert "AttributeError: no such thing" in str([record.__dict__ for record in caplog.records])


async def test_a_thread_that_is_left_over_tells_nothing(world: World) -> None:
    """The watch of the first run comes back when the second has long begun."""
    await meanwhile(world.agent.run(), lambda: world.cluster.watching == 1)
    await meanwhile(world.agent.run(), lambda: world.cluster.watching == 2)
    world.cluster.closed.set()
    async with asyncio.timeout(10):
        while any(thread.name == "kube-watch" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
    assert world.cluster.watching == 2


@pytest.mark.parametrize("ledger_errors", [0, 2])
async def test_who_is_newer_than_the_list_is_not_gone(world: World, ledger_errors: int) -> None:
    def arrive() -> None:
        world.cluster.there.append(NEW)
        world.driver.members.add(NEW)

    world.driver.members = {OLD}
    world.driver.ledger_errors = ledger_errors
    world.cluster.after_list = arrive
    await meanwhile(world.agent.run(), lambda: NEW in world.agent.pods)
    assert world.driver.gone == [OLD]


async def test_who_is_at_work_elsewhere_is_not_gone(world: World) -> None:
    """Another Deployment's pods may begin with the same name, and anybody may change a pod's labels."""
    world.driver.members, world.cluster.there = (
        {OLD, NEW, "roll-big-77-abcde"},
        [OLD, NEW, "roll-big-77-abcde"],
    )
    world.cluster.hidden = {"roll-big-77-abcde", NEW}
    world.cluster.pod_errors = [ClusterError("pod", "500", 500)]
    world.cluster.told = [("DELETED", pod(NEW)), ("ADDED", pod("roll-5d-last"))]
    await meanwhile(world.agent.run(), lambda: "roll-5d-last" in world.agent.pods)
    assert world.driver.gone == []
    assert set(world.agent.pods) == {OLD, "roll-5d-last"}, "and has no deletion cost of ours"


async def test_what_a_watch_has_missed_is_found_when_it_ends(world: World) -> None:
    world.driver.members, world.cluster.there = {OLD, NEW}, [OLD, NEW]
    world.cluster.after_list = lambda: world.cluster.there.remove(OLD)
    world.cluster.short = [None]
    await meanwhile(world.agent.run(), lambda: world.driver.gone)
    assert world.driver.gone == [OLD]


@pytest.mark.parametrize("error", [None, Expired("watch", "410", 410), ClusterError("watch", "500", 500)])
async def test_a_watch_that_ends_at_once_is_not_begun_again_at_once(
    world: World, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return super().wait(0.0)

    monkeypatch.setattr(
        "headrace_coordinator.kube.agent.threading", SimpleNamespace(Event=Stop, Thread=threading.Thread)
    )
    world.cluster.short = [error] * 12
    await meanwhile(world.agent.run(), lambda: world.cluster.watching)
    assert pauses[:12] == [0.01 * 2**n for n in range(12)]


@pytest.mark.parametrize(
    ("annotation", "cost"), [("12", 12), ("-3", -3), (None, None), ("--5", None), ("²", None), ("", None)]
)
def test_annotations_of_others_do_no_harm(annotation: str | None, cost: int | None) -> None:
    meta = SimpleNamespace(
        name="roll-1", uid="u", deletion_timestamp=None, annotations={DELETION_COST: annotation}
    )
    assert to_pod(SimpleNamespace(metadata=meta, status=None)).cost == cost


async def test_an_event_that_could_not_be_created_is_created_the_next_time(world: World) -> None:
    world.cluster.create_errors = [ClusterError("create_event", "500", 500)]
    for _ in range(2):
        await world.agent._event("Deployment", "train", "SyncFailed", "why")
    world.agent._aggregator.interval_s = 0.0
    await world.agent._event("Deployment", "train", "SyncFailed", "why")
    assert world.cluster.calls == {"create": 2, "count": 1}
