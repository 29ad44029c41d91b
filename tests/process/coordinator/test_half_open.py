"""Lines that fall silent without closing: how soon each end notices, and the work goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.redis_url import build
from headrace.connections.redis_client import connect_async
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.local.valkey_server import start_valkey
from headrace.service import coordinator_stream
from headrace.service.coordinator_stream import Outage
from headrace_rollouter.membership.member import Member
from headrace_trainer.launch.launch_stream import LaunchStream
from headrace_trainer.sync.sync_client import SyncClient
from tests.chaos.proxy import Proxy
from tests.process.coordinator.test_coordinator import Make, make, valkey
from tests.support import coordinator_peers
from tests.support.coordinator_peers import TOKEN
from tests.support.coordinator_process import until

__all__ = ["make", "valkey"]

BOUND_S = 15.0
STREAMS = {"headrace.rollouter.member", "headrace.trainer.sync", "headrace.trainer.launch"}


def member_at(address: str, token: str = TOKEN) -> Member:
    """The real one, of a rollouter without work."""

    async def nothing() -> None:
        pass

    engine: Any = SimpleNamespace(workers=1, pause=nothing)
    worker: Any = SimpleNamespace(version=-1, serving=asyncio.Event())
    config: Any = SimpleNamespace(sync=SimpleNamespace(pause_timeout_s=10.0, rendezvous_timeout_s=10.0))
    return Member(config, engine, worker, "rollouter-0-a", address, token)


async def test_the_coordinators_streams(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Every client, and the coordinator itself, which no client of this kind will tell."""
    caplog.set_level(logging.INFO)
    c = await make()
    proxy = Proxy(c.port)
    address = f"127.0.0.1:{proxy.port}"
    member = member_at(address)
    running = asyncio.create_task(member.run())
    nothing: Any = None
    trainer = SyncClient(nothing, c.open_lineage(), "127.0.0.1", 1, address, TOKEN, lambda _: None)
    node = LaunchStream(address, TOKEN, "node-0", 1, "127.0.0.1:1")
    gone = coordinator_peers.Member(address, "gone")  # pings nobody, and never comes back

    def up_again() -> set[str]:
        return {r.name for r in caplog.records if r.getMessage() == "coordinator stream is up again"}

    async def joined() -> set[str]:
        return set((await c.status()).joiners)

    try:
        await gone.connect()
        await gone.expect("welcome")
        await until(lambda: member.connected and trainer._welcome and node._launch, "all to be connected")
        assert await joined() == {"gone", "rollouter-0-a"}

        proxy.hush()
        began = time.monotonic()
        await until(lambda: up_again() == STREAMS, f"{STREAMS} to be up again", BOUND_S)
        print(f"up again after {time.monotonic() - began:.1f} s")

        async def missed() -> bool:
            return await joined() == {"rollouter-0-a"}

        await until(missed, "the coordinator to miss who is gone", began + BOUND_S - time.monotonic())
        broke = [r.name for r in caplog.records if r.getMessage() == "coordinator stream broke"]
        assert sorted(broke) == sorted(STREAMS), "once each"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(trainer.close)
        await asyncio.to_thread(node.close)
        await gone.close()
        proxy.close()


def test_client_and_server_agree() -> None:
    """A server ends the connection (too_many_pings) when it is pinged more often than it permits."""
    client, server = dict(coordinator_stream.CLIENT), dict(coordinator_stream.SERVER)
    for side in (client, server):
        noticed = side["grpc.keepalive_time_ms"] + max(
            side["grpc.keepalive_timeout_ms"], side["grpc.http2.ping_timeout_ms"]
        )
        assert noticed + client["grpc.max_reconnect_backoff_ms"] <= 1000 * BOUND_S
        assert side["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.http2.min_ping_interval_without_data_ms"] <= client["grpc.keepalive_time_ms"] / 2


def test_an_outage_is_told_once_then_sparsely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    outage = Outage(logging.getLogger("a"), lambda: now)
    pauses = []
    for _ in range(100):
        pauses.append(outage.lost(code="UNAVAILABLE"))
        now += 1.3
    outage.up()
    outage.up()
    said = [(r.getMessage(), getattr(r, "away_s", None)) for r in caplog.records]
    assert said == [
        ("coordinator stream broke", None),
        ("coordinator still away", 61.1),
        ("coordinator still away", 122.2),
        ("coordinator stream is up again", 130.0),
    ]
    assert max(pauses) <= coordinator_stream.AGAIN_AT_MOST_S
    assert outage.lost() <= coordinator_stream.AGAIN_FIRST_S, "the next outage begins anew"


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with start_valkey(tmp_path, "secret") as server:
        made = Proxy(server.port)
        yield made
        made.close()


TIMEOUT_S = 1.0
"""Of one attempt; `connect` gives five times as much by default."""


async def test_redis(proxy: Proxy) -> None:
    """One deadline passes, however many connections wait in the pool, where those that are up go first."""
    url = build("127.0.0.1", proxy.port, "secret")
    ledger = AsyncLedger(connect_async(url, TIMEOUT_S), "x", retry_s=20.0)
    await ledger.run(
        ops.configure(fingerprint="f", max_required=8, claim_size=4, max_retries=1, max_crashes=1, total=8)
    )
    await asyncio.gather(*(ledger.run(ops.beat(f"rollouter-{number}", 1)) for number in range(8)))
    assert proxy.hush() == 8
    async with asyncio.timeout(2.5 * TIMEOUT_S):
        await ledger.run(ops.beat("rollouter-0", 2))
    assert (await ledger.run(ops.beats()))["rollouter-0"] == 2
    await ledger.close()
