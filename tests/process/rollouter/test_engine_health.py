"""When an engine is well: one that receives weights cannot answer, one whose core has died never will."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.v1 import sync_pb2 as pb
from headrace_rollouter.inference.engine import Engine, EngineFailed, NotPaused


def engine_of(core: Any) -> Engine:
    return Engine(SimpleNamespace(rule=SimpleNamespace(crosses=None)), core, [])  # type: ignore[arg-type]


class BusyCore:
    """An engine core that does one thing at a time, and is in the middle of one."""

    errored = False

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.free.wait()

    async def is_paused(self) -> bool:
        if not self.free.is_set():
            raise TimeoutError("no answer")
        return True


async def test_it_is_not_asked_while_weights_travel() -> None:
    core = BusyCore()
    engine = engine_of(core)
    with pytest.raises(EngineFailed):
        await engine.check()
    joining = asyncio.create_task(engine.join_group(pb.Rendezvous(), 1))
    await asyncio.sleep(0)
    await engine.check()
    core.errored = True  # it dies while weights travel: that is no fault of the samples that it held
    with pytest.raises(EngineFailed, match="has died"):
        await engine.check()
    core.errored = False
    joining.cancel()  # as at the deadline that the member sets
    with pytest.raises(asyncio.CancelledError):
        await joining
    with pytest.raises(EngineFailed):
        await engine.check()


class RunningCore:
    """Not paused; says which calls it got."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def is_paused(self) -> bool:
        return False

    async def start_weight_update(self) -> None:
        self.calls.append("start")


async def test_no_weights_are_loaded_into_an_engine_that_may_be_generating() -> None:
    core = RunningCore()
    engine = engine_of(core)
    with pytest.raises(NotPaused):
        await engine.load(pb.Manifest(version=1))
    assert (core.calls, engine.dirty) == ([], False)


async def test_the_death_of_the_engine_core_is_noticed_by_itself() -> None:
    core = RunningCore()
    watching = asyncio.create_task(engine_of(core).watch())
    await asyncio.sleep(0)
    assert not watching.done()
    core.errored = True
    with pytest.raises(EngineFailed, match="has died"):
        await asyncio.wait_for(watching, 5)
