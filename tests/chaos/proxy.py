"""A TCP proxy that cuts connections, loses replies, and goes away, as networks do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_CHUNK = 1 << 16
_REFUSAL_S = 0.05


class Proxy:
    """Between clients and a server on this host. Runs in a thread of its own; every method is thread-safe."""

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self._host = host
        self._target = target_port
        self._loop = asyncio.new_event_loop()
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._away = False
        self._full = False
        self._lose = 0
        self.lost = 0
        """Replies that were swallowed so far: the server did what was asked, the client never heard."""
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.port = self._do(self._listen())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._connected, self._host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    # -- faults ----------------------------------------------------------------------------------

    def cut(self) -> int:
        """Close every connection now; returns how many there were."""
        return self._do(self._cut())

    async def _cut(self) -> int:
        links = list(self._links)
        for link in links:
            for writer in link:
                writer.transport.abort()
        return len(links)

    def away(self, is_away: bool) -> None:
        """While away, connections are closed and new ones refused."""
        self._away = is_away
        if is_away:
            self.cut()

    def full(self, is_full: bool) -> None:
        """While full, new connections are refused; those that are there go on."""
        self._full = is_full

    def lose_replies(self, count: int) -> None:
        """Swallow the next `count` replies, each together with its connection."""
        self._lose = count

    def close(self) -> None:
        async def shut() -> None:
            if self._server is not None:
                self._server.close()
            await self._cut()

        self._do(shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    # -- a connection ----------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._full:  # as where nothing answers any more: it takes its time to fail
            await asyncio.sleep(_REFUSAL_S)
        if self._away or self._full:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(self._host, self._target)
        except OSError:
            writer.transport.abort()  # the server is down: so it looks to the client
            return
        link = (writer, up_writer)
        self._links.add(link)
        try:
            pumps = [self._pump(reader, up_writer, False), self._pump(up_reader, writer, True)]
            tasks = [asyncio.ensure_future(pump) for pump in pumps]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._links.discard(link)
            for end in link:
                end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                if is_reply and self._lose > 0:
                    self._lose -= 1
                    self.lost += 1
                    return
                sink.write(data)
                await sink.drain()
