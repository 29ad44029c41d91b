"""A proxy that cuts, delays, narrows, garbles and swallows, and goes away, as networks do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_CHUNK = 1 << 16
_REFUSAL_S = 0.05
_END_S = 2.0
_SLICE = 1 << 12
"""Bytes that a narrow line carries at a time."""

Link = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class Proxy:
    """Between clients, which reach it by TCP, and a server on this host. Runs in a thread of its own; every
    method is thread-safe."""

    def __init__(self, target: int | Callable[[], Path | None], host: str = "127.0.0.1") -> None:
        """`target`: the server's port, or what tells the path of its Unix socket, None while it has none."""
        self._host = host
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._links: set[Link] = set()
        self._hushed: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._away = False
        self._full = False
        self._silent = False
        self._delay_s = 0.0
        self._rate = 0.0
        self._lose = 0
        self._repeat = 0
        self.repeated = 0
        """Chunks that went through twice so far."""
        self.moved = 0
        """Bytes that went through so far."""
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

    def hush(self) -> int:
        """Let the connections that are there carry nothing any more and stay open: half-open, as after
        a node has vanished. New ones work. Returns how many there were."""
        return self._do(self._hush())

    async def _hush(self) -> int:
        self._hushed |= self._links
        return len(self._hushed)

    @property
    def alive(self) -> int:
        """Connections that are there and carry something."""
        return len(self._links - self._hushed)

    def silent(self, is_silent: bool) -> None:
        """While silent, new connections are taken and carry nothing, like those that are there already."""
        self._silent = is_silent
        if is_silent:
            self.hush()

    def delay(self, seconds: float) -> None:
        """Everything takes `seconds` longer, each way; 0 for no longer."""
        self._delay_s = seconds

    def narrow(self, bytes_per_s: float) -> None:
        """Each connection carries so much and no more, each way; 0 for all that comes."""
        self._rate = bytes_per_s

    def repeat(self, count: int) -> None:
        """Send the next `count` chunks twice: the stream is garbled, and whoever reads it must notice."""
        self._repeat = count

    def close(self) -> None:
        async def shut() -> None:
            if self._server is not None:
                self._server.close()
            await self._cut()
            if self._tasks:  # what carried the connections ends with them
                await asyncio.wait(self._tasks, timeout=_END_S)

        self._do(shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    # -- a connection ----------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._full:  # as where nothing answers any more: it takes its time to fail
            await asyncio.sleep(_REFUSAL_S)
        if self._away or self._full:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await self._reach()
        except OSError:
            writer.transport.abort()  # the server is down: so it looks to the client
            return
        link = (writer, up_writer)
        self._links.add(link)
        if self._silent:
            self._hushed.add(link)
        try:
            pumps = [self._pump(link, reader, up_writer, False), self._pump(link, up_reader, writer, True)]
            tasks = [asyncio.ensure_future(pump) for pump in pumps]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._links.discard(link)
            self._hushed.discard(link)
            for end in link:
                end.transport.abort()

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, int):
            return await asyncio.open_connection(self._host, self._target)
        if (path := self._target()) is None:
            raise FileNotFoundError("no socket yet")
        return await asyncio.open_unix_connection(path)

    async def _pump(
        self, link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_reply: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                if link in self._hushed:
                    continue
                if is_reply and self._lose > 0:
                    self._lose -= 1
                    self.lost += 1
                    return
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if self._repeat > 0:
                    self._repeat -= 1
                    self.repeated += 1
                    data += data
                self.moved += len(data)
                await self._send(sink, data)

    async def _send(self, sink: asyncio.StreamWriter, data: bytes) -> None:
        at = 0
        while at < len(data):
            rate, began = self._rate, time.monotonic()
            part = data[at : at + (_SLICE if rate else len(data))]
            at += len(part)
            sink.write(part)
            await sink.drain()
            if rate:
                await asyncio.sleep(max(0.0, len(part) / rate - (time.monotonic() - began)))
