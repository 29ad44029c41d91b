"""Connections to Redis are few, and enough: they carry a burst, and those that are up carry all of the work
when new ones fail, as they do once the Service of a Redis is deleted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace.config.redis_url import build
from headrace.connections.redis_client import AT_ONCE, connect_async
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.local.valkey_server import start_valkey
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


async def test_a_burst_opens_no_more_than_the_limit(proxy: Proxy) -> None:
    """As when a canary passes, and all that waited for it leaves at once."""
    ledger = AsyncLedger(connect_async(build("127.0.0.1", proxy.port, "secret")), "x", retry_s=20.0)
    await ledger.run(
        ops.configure(fingerprint="f", max_required=8, claim_size=4, max_retries=1, max_crashes=1, total=8)
    )
    async with asyncio.timeout(15):
        for _ in range(3):
            await asyncio.gather(*(ledger.run(ops.beat(f"rollouter-{n}", 1)) for n in range(25 * AT_ONCE)))
    assert proxy.alive == AT_ONCE
    assert len(await ledger.run(ops.beats())) == 25 * AT_ONCE
    await ledger.close()


async def test_who_is_cancelled_gives_its_connection_back(proxy: Proxy) -> None:
    """Work that is dropped is cancelled wherever it is: on its way, and before its turn."""
    client = connect_async(build("127.0.0.1", proxy.port, "secret"), timeout_s=5.0)
    proxy.delay(0.05)
    for round_ in range(4):
        calls = [asyncio.ensure_future(client.ping()) for _ in range(3 * AT_ONCE)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for call in calls[round_ % 2 :: 2]:
            call.cancel()
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert not [e for e in ended if isinstance(e, redis.RedisError)], "the others have their turn"
    async with asyncio.timeout(10):
        await asyncio.gather(*(client.ping() for _ in range(3 * AT_ONCE)))
    await client.aclose()


async def test_waiting_for_a_connection_ends(proxy: Proxy) -> None:
    client = connect_async(build("127.0.0.1", proxy.port, "secret"), timeout_s=0.5)
    proxy.silent(True)
    began = time.monotonic()
    ended = await asyncio.gather(*(client.ping() for _ in range(3 * AT_ONCE)), return_exceptions=True)
    assert {type(error) for error in ended} <= {redis.TimeoutError, redis.ConnectionError}
    assert time.monotonic() - began < 3.0, "each waits for its turn, and then for its answer"
    await client.aclose()
