"""The stream between a service and the coordinator, which reconnects after every outage. All services use it.

    connect           through `headrace.connections.tls`. Unreadable certificate files are waited for
                      (`tls.Patience`), then TlsError
    hello             the first reports of every connection. Reports sent over an earlier connection may be
                      lost, so these repeat everything that the coordinator has to know
    commands          handled one at a time. All commands of a connection are handled before the next hello.
                      Commands with a lower term than the highest seen are dropped
    silence           both ends ping (`headrace.service.coordinator_stream`); a half-open connection counts as
                      broken
    broken, or ended  retried for ever with back-off and jitter (`Outage`)
    refused           TokenRefused or CoordinatorRefused; retrying does not help
    last report       after it, the connection's clean end is the end of the stream

`run` ends only in these ways, or with what a handler raises. Deadlines are the callers': a rollouter without
a coordinator waits, while a round that is not committed in time fails.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from headrace.connections import tls
from headrace.connections.variables import bearer
from headrace.service import coordinator_stream
from headrace.service.coordinator_stream import CoordinatorRefused, Outage, TokenRefused
from headrace.v1 import sync_pb2_grpc

Report = TypeVar("Report")
Command = TypeVar("Command")


class ReconnectingStream(Generic[Report, Command]):
    """A stream for one event loop. `StreamThread` runs one for code without a loop."""

    def __init__(
        self,
        address: str,
        token: str,
        method: str,
        hello: Callable[[], Sequence[Report]],
        on: Callable[[Command], Awaitable[None]],
        *,
        log: logging.Logger,
        certificates_s: float,
        admit: Callable[[Command], None] | None = None,
    ) -> None:
        """`method`: name of the coordinator's RPC. `hello`: the first reports of each connection. `on`:
        handles a command. `admit`: called with each command on arrival, even while another is being handled;
        its exceptions end the stream. `certificates_s`: how long to wait for unreadable certificate files."""
        self._address = address
        self._metadata = bearer(token)
        self._method = method
        self._hello = hello
        self._on = on
        self._admit = admit
        self._log = log
        self._certificates_s = certificates_s
        self._outage = Outage(log)
        self._last = False
        self.outgoing: asyncio.Queue[Report | None] = asyncio.Queue()
        """Reports still to be sent over the current connection; None marks its end."""
        self.connected = False
        """Whether the coordinator has answered over the current connection."""
        self.ended = asyncio.Event()
        """Set when the current connection has ended. Every connection has its own event."""
        self.term = 0
        """The highest term of any command so far."""

    def send(self, report: Report) -> None:
        """Send `report` over the current connection. It is lost if there is none."""
        self.outgoing.put_nowait(report)

    def send_last(self, report: Report) -> None:
        """Send the last report, after which the coordinator ends the stream. Without a connection, the next
        hello has to say the same."""
        self._last = True
        self.send(report)

    def expect_the_end(self) -> None:
        """Note that the coordinator has announced the end of the stream: do not reconnect after it."""
        self._last = True

    async def run(self) -> None:
        """Keep the stream up. Raises TokenRefused, CoordinatorRefused, TlsError, and what `on` and `admit`
        raise."""
        while True:
            try:
                async with await self._channel() as channel:
                    await self._connection(sync_pb2_grpc.CoordinatorStub(channel))
                if self._last:
                    return
                pause = self._outage.pause()
            except grpc.aio.AioRpcError as error:
                self._raise_if_refused(error)
                pause = self._outage.lost(
                    address=self._address, code=str(error.code()), details=error.details()
                )
            finally:
                self.connected = False
                self.ended.set()
            await asyncio.sleep(pause)

    async def _channel(self) -> Any:
        patience = tls.Patience(self._certificates_s)
        while True:
            try:
                return tls.aio_channel(self._address, coordinator_stream.CLIENT)
            except tls.NotUsable as error:
                await asyncio.sleep(patience.after(error))

    def _raise_if_refused(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise TokenRefused(self._address) from error
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise CoordinatorRefused(
                f"the coordinator at {self._address} refuses this service: {error.details()}"
            ) from error

    async def _connection(self, stub: Any) -> None:
        """Run one connection from hello until one side ends it. Raises AioRpcError if it breaks."""
        self.outgoing = asyncio.Queue()
        self.ended = asyncio.Event()
        for report in self._hello():
            self.send(report)
        call = getattr(stub, self._method)(_each(self.outgoing), metadata=self._metadata)
        commands: asyncio.Queue[Command | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(call, commands))
        dealing = asyncio.create_task(self._deal(commands))
        try:
            await asyncio.wait({reading, dealing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and isinstance(reading.exception(), grpc.aio.AioRpcError | None):
                commands.put_nowait(None)  # handle what has arrived first: the next hello reports the result
                await dealing
            for task in (reading, dealing):
                if task.done():
                    task.result()
        finally:
            for task in (reading, dealing):
                task.cancel()
            await asyncio.gather(reading, dealing, return_exceptions=True)
            self.outgoing.put_nowait(None)  # otherwise gRPC's task that reads the reports waits for ever

    async def _read(self, call: Any, commands: asyncio.Queue[Command | None]) -> None:
        await call.initial_metadata()  # the only sign for a trainer node whose launch is still running
        if not call.done():
            self.connected = True
            self._outage.up()
        async for command in call:
            term = getattr(command, "term", self.term)  # commands to a trainer's node have none
            if term < self.term:
                self._log.warning("command of an old term refused", extra={"term": term, "known": self.term})
                continue
            self.term = term
            if self._admit is not None:
                self._admit(command)
            commands.put_nowait(command)

    async def _deal(self, commands: asyncio.Queue[Command | None]) -> None:
        while (command := await commands.get()) is not None:
            await self._on(command)


async def _each(reports: asyncio.Queue[Report | None]) -> AsyncIterator[Report]:
    while (report := await reports.get()) is not None:
        yield report


class StreamThread:
    """Runs a stream in its own thread. Other threads reach the stream through `call` only."""

    def __init__(
        self, stream: ReconnectingStream[Any, Any], name: str, failed: Callable[[Exception], None]
    ) -> None:
        """`failed`: called in the thread with the exception that ended the stream."""
        self._stream = stream
        self._failed = failed
        self._closing = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call `function(*args)` in the thread, soon. Does nothing once the stream has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # its loop is closed
            if self._thread.is_alive():
                raise

    def join(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds; return whether the stream has ended."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def close(self, within_s: float) -> bool:
        """End the stream, whatever it is doing; return whether it ended within `within_s` seconds."""
        self.call(self._closing.set)
        return self.join(within_s)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        running = asyncio.create_task(self._stream.run())
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({running, closing}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, closing):
            task.cancel()
        await asyncio.gather(running, closing, return_exceptions=True)
        if not running.cancelled() and isinstance(error := running.exception(), Exception):
            self._failed(error)
