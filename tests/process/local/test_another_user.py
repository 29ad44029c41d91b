"""Another user of the machine takes the place of a service that has crashed: what he is sent there.

A port is his for the taking, the path of a socket in a run's folder is not. `test_elastic` has the same in a
whole run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace.connections.net import free_port
from headrace.connections.redis_client import connect
from headrace.local import scratch
from headrace.local.valkey_server import start_valkey
from tests import waiting
from tests.pretender import IS_ANOTHER, Place, Pretender
from tests.process.coordinator.test_coordinator import Make, make, valkey
from tests.process.coordinator.test_half_open import member_at
from tests.support.coordinator_peers import TOKEN
from tests.support.coordinator_process import until

__all__ = ["make", "valkey"]

PASSWORD = "hunter2-password"
TRIES = 50
needs_another = pytest.mark.skipif(not IS_ANOTHER, reason="only root can play another user")
kinds = pytest.mark.parametrize("at_socket", [False, pytest.param(True, marks=needs_another)])


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a run's sockets."""
    made = scratch.create()
    yield made.root
    made.remove()


def has_failed(other: Pretender) -> bool:
    (note,) = other.notes().values()
    assert not note["taken"]
    return bool(note["failures"] >= TRIES)


@kinds
async def test_a_coordinators_port_brings_him_the_token(make: Make, folder: Path, at_socket: bool) -> None:
    c = await make()
    if at_socket:
        c.kill()
        c.socket = folder / "coordinator.sock"
        await c.up()
    member = member_at(c.address)
    running = asyncio.create_task(member.run())
    await until(lambda: member.connected, "a rollouter")
    place: Place = str(c.socket) if at_socket else ("127.0.0.1", c.port)
    try:
        with Pretender([place]) as other:
            c.kill()
            await until(lambda: not member.connected, "the rollouter to lose it")
            if not at_socket:
                await until(lambda: TOKEN in str(other.notes()), "the token")
                return
            await until(lambda: has_failed(other), "him to try")
            await c.up()
            await until(lambda: member.connected, "the rollouter to find the next one")
            assert has_failed(other)
            assert {(n["heard"], n["error"]) for n in other.notes().values()} == {("", "Permission denied")}
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@kinds
def test_a_valkeys_port_brings_him_the_password(tmp_path: Path, folder: Path, at_socket: bool) -> None:
    at = folder / "valkey.sock" if at_socket else free_port()
    with start_valkey(tmp_path, PASSWORD, at) as server, connect(server.url, timeout_s=0.5) as client:
        assert client.ping()
        with Pretender([str(at) if isinstance(at, Path) else ("127.0.0.1", at)]) as other:
            server.kill()

            def calls() -> bool:
                with pytest.raises(redis.RedisError):
                    client.ping()
                return PASSWORD in str(other.notes())

            if not at_socket:
                waiting.until(calls, "the password")
                return
            waiting.until(lambda: has_failed(other), "him to try")
            assert not calls()
            with start_valkey(tmp_path, PASSWORD, at):
                assert client.ping()
            assert has_failed(other)
            assert {(n["heard"], n["error"]) for n in other.notes().values()} == {("", "Permission denied")}
