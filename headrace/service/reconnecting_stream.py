"""A service's stream to the coordinator, which comes back after every outage: one for all services.

    connect           as `headrace.connections.tls` has it; certificate files that cannot be read are
                      waited for (`tls.Patience`), then TlsError
    hello             the first reports of every connection. A report that was sent over an earlier one may
                      be lost, so they tell the coordinator all that it has to know
    commands          one after the other; all that came over a connection are dealt with before the next
                      hello. Those of a term lower than the highest seen are dropped
    silence           both ends ping (`headrace.service.coordinator_stream`): a half-open line counts as
                      broken
    broken, or ended  tried again, for ever, after a growing pause with jitter (`Outage`)
    refused           TokenRefused or CoordinatorRefused: asking again changes nothing
    last report       the connection's orderly end is the end of the stream

`run` ends only as said here, or with what a handler raises. Callers have the deadlines: a rollouter without a
coordinator waits, a round that is not committed in time fails.
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
    """For one event loop; `StreamThread` keeps one up for code without a loop."""

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
        """`method`: the coordinator's, by name. `admit`: shown each command as soon as it arrives, whatever
        is being dealt with; what it raises ends the stream. `certificates_s`: how long certificate files
        that cannot be read are waited for."""
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
        """Reports of the present connection that are not sent yet; None after its end."""
        self.connected = False
        """Whether the coordinator has answered over the present connection."""
        self.ended = asyncio.Event()
        """Set when the present connection has ended; every connection has its own."""
        self.term = 0
        """The highest that a command has named."""

    def send(self, report: Report) -> None:
        """Over the present connection; lost when there is none."""
        self.outgoing.put_nowait(report)

    def send_last(self, report: Report) -> None:
        """The coordinator is to end the stream after this one. While there is no connection the next hello
        has to say the same."""
        self._last = True
        self.send(report)

    def expect_the_end(self) -> None:
        """The coordinator has said that it will end the stream."""
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
            except tls.NotThere as error:
                await asyncio.sleep(patience.after(error))

    def _raise_if_refused(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise TokenRefused(self._address) from error
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise CoordinatorRefused(
                f"the coordinator at {self._address} refuses this service: {error.details()}"
            ) from error

    async def _connection(self, stub: Any) -> None:
        """From hello until one side ends it. Raises AioRpcError when it breaks."""
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
                commands.put_nowait(None)  # what has come is dealt with; the next hello says what it came to
                await dealing
            for task in (reading, dealing):
                if task.done():
                    task.result()
        finally:
            for task in (reading, dealing):
                task.cancel()
            await asyncio.gather(reading, dealing, return_exceptions=True)
            self.outgoing.put_nowait(None)  # gRPC's task that reads the reports would wait for ever

    async def _read(self, call: Any, commands: asyncio.Queue[Command | None]) -> None:
        await call.initial_metadata()  # a trainer's node whose launch goes on hears nothing else
        if not call.done():
            self.connected = True
            self._outage.up()
        async for command in call:
            term = getattr(command, "term", self.term)  # a node's commands have none
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
    """Keeps a stream up in a thread, which has the stream to itself: others reach it by `call`."""

    def __init__(
        self, stream: ReconnectingStream[Any, Any], name: str, failed: Callable[[Exception], None]
    ) -> None:
        """`failed`: called in the thread with what has ended the stream, when it was not told to end."""
        self._stream = stream
        self._failed = failed
        self._closing = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """`function(*args)` in the thread, soon. Nothing happens once the stream has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # its loop is closed
            if self._thread.is_alive():
                raise

    def join(self, within_s: float) -> bool:
        """Whether the stream has ended within so many seconds."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def close(self, within_s: float) -> bool:
        """End the stream, whatever it is doing; whether that took no longer than `within_s` seconds."""
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
