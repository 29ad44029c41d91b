"""The member's side of the coordinator's stream: reports up, commands down.

The stream may break and come back at any time; a paused engine stays paused meanwhile. Commands of a
lower term than the highest one seen are refused. They are dealt with one after the other, but an expulsion is
heard at once, whatever is being dealt with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable

import grpc

from headrace import coordinator_stream, tls
from headrace.config import RunConfig
from headrace.coordinator_stream import Outage
from headrace.environment import bearer
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.metrics import rollouter as metrics
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_rollouter.engine import Engine, EngineFailed
from headrace_rollouter.work import Worker

log = logging.getLogger("headrace.rollouter.member")

_PROGRESS_S = 1.0
_ASK_S = 5.0


class Expelled(RuntimeError):
    """The coordinator expired this incarnation, or refuses it; the process must start anew."""


class Member:
    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        worker: Worker,
        incarnation: str,
        address: str,
        token: str,
        nccl: str = "",
    ) -> None:
        self._config = config
        self._engine = engine
        self._worker = worker
        self._incarnation = incarnation
        self._address = address
        self._metadata = bearer(token)
        self._nccl = nccl
        self._reports: asyncio.Queue[pb.MemberReport] = asyncio.Queue()
        self._term = 0
        self._paused_ns = time.monotonic_ns()
        self._session = 0
        self._turn = asyncio.Lock()
        """Held while a command, or the news that this incarnation was expired, is dealt with."""
        self._was_expired = False
        """That news waits for its turn."""
        self._outage = Outage(log)
        self.connected = False
        self.left = asyncio.Event()
        """Set whenever a stream has ended."""

    @property
    def _paused(self) -> bool:
        """Whether the engine is: from its start, and from each pause to the resume that follows."""
        return not self._worker.serving.is_set()

    async def run(self) -> None:
        """Keeps the stream up for ever. Raises Expelled or EngineFailed."""
        await self._answered(self._engine.pause(), "paused")  # its hello says so
        while True:
            try:
                async with tls.aio_channel(self._address, coordinator_stream.CLIENT) as channel:
                    await self._stream(sync_pb2_grpc.CoordinatorStub(channel))
                pause = self._outage.pause()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    raise Expelled(f"{self._address} refuses the token: {error.details()}") from error
                pause = self._outage.lost(code=str(error.code()), details=error.details())
            finally:
                self.connected = False
                self.left.set()
            await asyncio.sleep(pause)

    async def _stream(self, stub: sync_pb2_grpc.CoordinatorStub) -> None:
        self._reports = asyncio.Queue()
        self._report(
            hello=pb.MemberHello(
                incarnation=self._incarnation,
                workers=self._engine.workers,
                version=self._worker.version,
                paused=self._paused,
                nccl=self._nccl,
            )
        )
        call = stub.Member(self._outgoing(), metadata=self._metadata)
        commands: asyncio.Queue[pb.MemberCommand | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(call, commands))
        dealing = asyncio.create_task(self._deal(commands))
        try:
            await asyncio.wait({reading, dealing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not isinstance(reading.exception(), Expelled):
                commands.put_nowait(None)  # what has come is dealt with; the next stream says what it came to
                await dealing
            for task in (reading, dealing):
                if task.done():
                    task.result()
        finally:
            for task in (reading, dealing):
                task.cancel()
            await asyncio.gather(reading, dealing, return_exceptions=True)

    async def _read(
        self, call: AsyncIterable[pb.MemberCommand], commands: asyncio.Queue[pb.MemberCommand | None]
    ) -> None:
        async for command in call:
            self.connected = True
            self._outage.up()
            if command.term < self._term:
                log.warning(
                    "command of an old term refused", extra={"term": command.term, "known": self._term}
                )
                continue
            self._term = command.term
            if command.HasField("expelled"):
                raise Expelled(f"the coordinator refuses this rollouter: {command.expelled.reason}")
            commands.put_nowait(command)

    async def _deal(self, commands: asyncio.Queue[pb.MemberCommand | None]) -> None:
        while (command := await commands.get()) is not None:
            async with self._turn:
                await self._on(command)

    async def _outgoing(self) -> AsyncIterator[pb.MemberReport]:
        reports = self._reports
        while True:
            yield await reports.get()

    def _report(self, **report: object) -> None:
        self._reports.put_nowait(pb.MemberReport(**report))  # type: ignore[arg-type]

    async def _on(self, command: pb.MemberCommand) -> None:
        match command.WhichOneof("command"):
            case "pause":
                await self._pause(command.pause)
            case "join":
                await self._join(command.join)
            case "load":
                await self._load(command.load)
            case "resume":
                await self._resume(command.resume)

    async def expired(self, ledger: AsyncLedger) -> bool:
        """This incarnation was expired: stop, and drop what is others' by now; the coordinator takes it in
        again. When it has been faster, this is a member again, and only what it has lost is dropped.

        False when the ledger did not say what is lost: the caller asks again.
        """
        self._was_expired = True  # what a pause lets finish is others'
        async with self._turn:
            members = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_S):  # the coordinator may be waiting for this turn
                    members = (await ledger.run(ops.stats())).members
            if members is None:
                log.warning("was expired, and cannot ask the ledger what is lost")
            elif self._incarnation in members:
                await self._worker.drop_lost()
            else:
                await self._pause(pb.MemberPause(drop_work=True))
            self._was_expired = False
            return members is not None

    async def _pause(self, pause: pb.MemberPause) -> None:
        if pause.drop_work:
            await self._worker.drop_work()
        elif pause.HasField("finish_through") and not self._paused:  # what is frozen would never finish
            with self._worker.trace.slice("let_finish", running=self._worker.running):
                await self._let_finish(pause.finish_through)
        if not self._paused:
            await self._answered(self._engine.pause(), "paused")
            self._paused_ns = time.monotonic_ns()
            self._worker.paused()
        self._report(paused=pb.MemberPaused(term=self._term, round=pause.round))

    async def _let_finish(self, through: int) -> None:
        """Samples with tokens of version `through` or older end first; report tokens as they come.

        Takes are held by the ledger meanwhile, so that this ends.
        """
        while self._must_wait(through):
            self._report(
                progress=pb.MemberProgress(
                    tokens=self._engine.generated_tokens + self._worker.scored, running=self._worker.running
                )
            )
            for _ in range(int(_PROGRESS_S / 0.02)):
                if not self._must_wait(through):
                    return
                await asyncio.sleep(0.02)

    def _must_wait(self, through: int) -> bool:
        """Also for a take whose reply is not here yet: it may bring what is too old to be frozen."""
        old = self._worker.taking or self._worker.running_through(through) > 0
        return old and not self._was_expired

    async def _join(self, join: pb.JoinGroup) -> None:
        self._session = join.session
        try:
            limit = join.rendezvous.timeout_s + 10.0
            await asyncio.wait_for(self._engine.join_group(join.rendezvous, join.rank_offset), limit)
        except Exception as error:  # whatever the worker raised: the coordinator decides what follows
            self._failed(join.session, error)
            return
        self._report(ready=pb.MemberReady(term=self._term, session=join.session))

    async def _load(self, load: pb.Load) -> None:
        trace = self._worker.trace
        try:
            with trace.slice("load", version=load.manifest.version):
                digest, load_s = await asyncio.wait_for(
                    self._engine.load(load.manifest), self._config.sync.transfer_timeout_s
                )
        except EngineFailed:
            raise
        except Exception as error:  # as above; the engine stays dirty until a full transfer goes through
            self._failed(load.session, error)
            return
        self._report(
            loaded=pb.MemberLoaded(term=self._term, session=load.session, digest=digest, load_s=load_s)
        )

    def _failed(self, session: int, error: BaseException) -> None:
        log.warning("transfer failed", extra={"session": session, "error": repr(error)[:500]})
        self._report(failed=pb.MemberFailed(term=self._term, session=session, error=repr(error)[:2000]))

    async def _answered(self, verb: Awaitable[None], what: str) -> None:
        """Raises EngineFailed: nobody else notices an engine that lives and does not answer."""
        c = self._config.sync
        limit = c.pause_timeout_s + c.rendezvous_timeout_s  # it may still be meeting a group that is gone
        try:
            await asyncio.wait_for(verb, limit)
        except TimeoutError:
            raise EngineFailed(f"the engine has not {what} within {limit:g} s") from None

    async def _resume(self, resume: pb.Resume) -> None:
        await self._answered(self._engine.resume(resume.version), "resumed")
        self._worker.trace.complete("paused", self._paused_ns, time.monotonic_ns(), version=resume.version)
        self._worker.resumed(resume.version)
        metrics.VERSION.set(resume.version)
        difference = 0.0
        if resume.HasField("canary"):
            difference = await asyncio.wait_for(
                self._engine.canary(resume.canary), self._config.sync.transfer_timeout_s
            )
        self._report(resumed=pb.MemberResumed(version=resume.version, canary_max_abs_diff=difference))
        if not difference <= self._config.canary_limit:  # NaN is no agreement either
            limit = self._config.canary_limit
            raise EngineFailed(
                f"after the sync to version {resume.version} the engine's log-probs differ from the "
                f"trainer's by {difference:.3g} (sync.canary_tolerance {limit:g})"
            )
        self._worker.trusted.set()

    async def leave(self) -> None:
        """Say goodbye, so that nobody waits for the lease; the coordinator then ends the stream."""
        if self.connected:
            self.left = asyncio.Event()
            self._report(leaving=pb.MemberLeaving())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.left.wait(), 5.0)
