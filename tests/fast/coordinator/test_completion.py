"""What the coordinator does once when a run has completed, whoever looks and however often it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from headrace.config.kubernetes import KubernetesConfig
from headrace.ledger.client import LedgerError
from headrace_coordinator.kube.completion import Completion

ROLL, TRAIN = "roll", "train"
SCALES = KubernetesConfig(
    enable=True, rollouter_deployment=ROLL, trainer_deployment=TRAIN, scale_to_zero_on_completion=True
)
STAYS = SCALES.model_copy(update={"scale_to_zero_on_completion": False})


class World:
    """A ledger, its Redis, and a cluster; processes of the coordinator come and go."""

    def __init__(self) -> None:
        self.lineage, self.term, self.completed = 1, 1, True
        self.away = False
        self.kept: dict[bytes, bytes] = {}
        self.replicas = {ROLL: 2, TRAIN: 1}
        self.events: list[tuple[str, str]] = []
        """Name and note of each that was created."""
        self.failing: Counter[str] = Counter()
        """How often the calls for a Deployment, or `event`, fail from now on."""
        self.before_scale: Callable[[str], None] = lambda _: None
        self.now = 0.0

    # the ledger

    async def run(self, _: Any) -> Any:
        if self.away:
            raise LedgerError("away")
        return SimpleNamespace(completed=self.completed, lineage=self.lineage, term=self.term)

    async def hgetall(self, _: str) -> dict[bytes, bytes]:
        return dict(self.kept)

    async def hset(self, _: str, field: str, value: int) -> None:
        if self.away:
            raise redis.ConnectionError("away")
        self.kept[field.encode()] = str(value).encode()

    # the cluster

    def scale(self, name: str, to: int) -> None:
        self.replicas[name] = to

    def create_event(self, name: str, _: str, about: str, reason: str, note: str, *rest: Any) -> None:
        assert (about, reason) == (TRAIN, "RunCompleted")
        self.events.append((name, note))

    async def attempt(self, call: Callable[..., None], *args: Any) -> bool:
        what = args[0] if call == self.scale else "event"
        if self.failing[what]:
            self.failing[what] -= 1
            return False
        call(*args)
        self.before_scale(what)
        return True

    def process(self, term: int = 1) -> Completion:
        self.term = term
        driver = SimpleNamespace(
            ledger=SimpleNamespace(run=self.run, redis=SimpleNamespace(hgetall=self.hgetall, hset=self.hset)),
            term=term,
            state=SimpleNamespace(version=7),
        )
        cluster: Any = self
        return Completion("x", driver, cluster, self.attempt, "pod", lambda: self.now)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


async def test_it_is_done_once_and_what_is_scaled_up_later_stays(world: World) -> None:
    first = world.process()
    assert await first.look(SCALES)
    assert world.replicas == {ROLL: 0, TRAIN: 0}
    world.replicas[ROLL] = 1  # somebody wants to look at files
    assert await first.look(SCALES)
    assert await world.process(2).look(SCALES), "the coordinator has started anew"
    assert world.replicas == {ROLL: 1, TRAIN: 0}
    assert [note for _, note in world.events] == [
        "version 7 is exported; rollouters and trainer are scaled to none"
    ]


async def test_a_run_that_was_opened_again_completes_again(world: World) -> None:
    look = world.process().look
    await look(SCALES)
    world.replicas = {ROLL: 2, TRAIN: 1}
    assert await look(SCALES), "the trainer is still starting"
    world.lineage, world.completed = 2, False
    assert await look(SCALES)
    assert world.replicas == {ROLL: 2, TRAIN: 1}
    world.completed = True
    assert await look(SCALES)
    assert (world.replicas, len(world.events)) == ({ROLL: 0, TRAIN: 0}, 2)


async def test_a_run_that_is_opened_in_between_keeps_its_trainer(world: World) -> None:
    def open_again(what: str) -> None:
        world.lineage, world.completed = 2, False

    world.before_scale = open_again
    assert await world.process().look(SCALES)
    assert world.replicas == {ROLL: 0, TRAIN: 1}
    assert world.events == []


async def test_each_step_is_tried_until_it_works_and_none_waits_for_another(world: World) -> None:
    look = world.process().look
    world.failing.update({TRAIN: 2, "event": 1})
    assert not await look(SCALES)
    assert world.replicas == {ROLL: 0, TRAIN: 1}
    world.replicas[ROLL] = 1
    assert not await look(SCALES)
    assert [note for _, note in world.events] == [
        "version 7 is exported; rollouters and trainer could not yet be scaled to none"
    ]
    assert await look(SCALES)
    assert world.replicas == {ROLL: 1, TRAIN: 0}, "what is done is not done again"
    assert await look(SCALES)
    assert len(world.events) == 1


async def test_the_event_is_given_up_at_last(world: World) -> None:
    look = world.process().look
    world.failing["event"] = 10**6
    for world.now in (0.0, 300.0, 599.0):
        assert not await look(STAYS)
    world.now = 601.0
    assert await look(STAYS)
    world.failing.clear()
    assert await look(STAYS)
    assert world.events == []


async def test_scaling_that_is_asked_for_afterwards_is_done(world: World) -> None:
    look = world.process().look
    await look(STAYS)
    assert world.replicas == {ROLL: 2, TRAIN: 1}
    await look(SCALES)
    assert (world.replicas, len(world.events)) == ({ROLL: 0, TRAIN: 0}, 1)


async def test_a_coordinator_that_was_superseded_does_nothing(world: World) -> None:
    old = world.process(1)
    world.process(2)
    assert await old.look(SCALES)
    assert (world.replicas, world.events) == ({ROLL: 2, TRAIN: 1}, [])


async def test_it_waits_for_the_ledger(world: World) -> None:
    look = world.process().look
    world.away = True
    assert not await look(SCALES)
    assert world.replicas == {ROLL: 2, TRAIN: 1}
    world.away = False
    assert await look(SCALES)
    assert world.replicas == {ROLL: 0, TRAIN: 0}
