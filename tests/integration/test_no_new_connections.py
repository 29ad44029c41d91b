"""A Redis whose Service is deleted: connections that are up go on, new ones fail. Nobody is lost by that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.redis_connect import connect_async
from headrace.redis_url import build
from headrace.valkey_server import start_valkey
from tests.chaos.proxy import Proxy


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with start_valkey(tmp_path, "secret") as server:
        made = Proxy(server.port)
        yield made
        made.close()


async def test_what_is_up_carries_everything(proxy: Proxy) -> None:
    """A drain asks for more connections at once than there are, and goes on, one after the other."""
    ledger = AsyncLedger(connect_async(build("127.0.0.1", proxy.port, "secret")), "x", retry_s=20.0)
    await ledger.run(
        ops.configure(fingerprint="f", max_required=8, claim_size=4, max_retries=1, max_crashes=1, total=8)
    )
    proxy.full(True)
    async with asyncio.timeout(15):
        await asyncio.gather(*(ledger.run(ops.beat(f"rollouter-{number}", 1)) for number in range(8)))
        for count in range(1, 4):
            await ledger.run(ops.beat("a", count))
    await ledger.close()
