"""An engine that receives weights cannot answer, and is well."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.v1 import sync_pb2 as pb
from headrace_rollouter.engine import Engine, EngineFailed


class BusyCore:
    """An engine core that does one thing at a time, and is in the middle of one."""

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
    rule = SimpleNamespace(crosses=None)
    engine = Engine(SimpleNamespace(rule=rule), core, [])  # type: ignore[arg-type]
    with pytest.raises(EngineFailed):
        await engine.check()
    joining = asyncio.create_task(engine.join_group(pb.Rendezvous(), 1))
    await asyncio.sleep(0)
    await engine.check()
    joining.cancel()  # as at the deadline that the member sets
    with pytest.raises(asyncio.CancelledError):
        await joining
    with pytest.raises(EngineFailed):
        await engine.check()
