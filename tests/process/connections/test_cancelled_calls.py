"""A task that is cancelled in the midst of a call to Redis ends, whatever moment of the call that is."""

from __future__ import annotations

import asyncio

import redis

from headrace.connections.redis_client import connect_async

TURNS = 100
"""Of the event loop before the cancellation: a call takes about ten, so every moment of one is met."""
END_S = 5.0


def test_a_task_that_calls_the_server_ends_when_it_is_cancelled(quick_valkey: redis.Redis) -> None:
    """redis-py alone lets about one cancellation in eight pass."""
    settings = quick_valkey.connection_pool.connection_kwargs
    url = f"redis://:{settings['password']}@{settings['host']}:{settings['port']}/0"

    async def calls(client: redis.asyncio.Redis, count: int) -> None:
        for number in range(count):
            assert await client.echo(str(number)) == str(number).encode(), "the answer to an earlier call"

    async def all_moments() -> None:
        client = connect_async(url)
        try:
            for turns in range(TURNS):
                task = asyncio.create_task(calls(client, 1_000_000))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                _, late = await asyncio.wait({task}, timeout=END_S)
                assert not late, f"it goes on, cancelled after {turns} turns of the loop"
                assert task.cancelled()
                await calls(client, 3)
        finally:
            await client.aclose()

    asyncio.run(all_moments())
