"""The member's side of the coordinator's stream: reports up, commands down.

A paused engine stays paused while the stream is down. Commands are handled one at a time, but an expulsion
takes effect at once, even while another command is being handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable

from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.metrics import rollouter as metrics
from headrace.service.reconnecting_stream import ReconnectingStream
from headrace.v1 import sync_pb2 as pb
from headrace_rollouter.generation.work import Worker
from headrace_rollouter.inference.engine import Engine, EngineFailed

log = logging.getLogger("headrace.rollouter.member")

_PROGRESS_S = 1.0
_ASK_S = 5.0
_LEAVE_S = 5.0


class Expelled(RuntimeError):
    """The coordinator expired this incarnation. The process must be restarted."""


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
        certificates_s: float = 0.0,
    ) -> None:
        self._config = config
        self._engine = engine
        self._worker = worker
        self._incarnation = incarnation
        self._nccl = nccl
        self.stream: ReconnectingStream[pb.MemberReport, pb.MemberCommand] = ReconnectingStream(
            address,
            token,
            "Member",
            self._hello,
            self._deal,
            log=log,
            certificates_s=certificates_s,
            admit=_raise_if_expelled,
        )
        self._paused_ns = time.monotonic_ns()
        self._session = 0
        self._turn = asyncio.Lock()
        """Held while a command, or this incarnation's expiry, is being handled."""
        self._was_expired = False
        """This incarnation was expired, and that has not been handled yet."""

    @property
    def connected(self) -> bool:
        return self.stream.connected

    @property
    def _paused(self) -> bool:
        """Whether the engine is paused: from its start, and from each pause to the next resume."""
        return not self._worker.serving.is_set()

    async def run(self) -> None:
        """Keep the stream up until `leave`. Raises Expelled, EngineFailed, and what a ReconnectingStream
        raises."""
        await self._answered(self._engine.pause(), "paused")  # the hello reports the engine as paused
        await self.stream.run()

    def _hello(self) -> list[pb.MemberReport]:
        hello = pb.MemberHello(
            incarnation=self._incarnation,
            workers=self._engine.workers,
            version=self._worker.version,
            paused=self._paused,
            nccl=self._nccl,
        )
        return [pb.MemberReport(hello=hello)]

    async def _deal(self, command: pb.MemberCommand) -> None:
        async with self._turn:
            await self._on(command)

    def _report(self, **report: object) -> None:
        self.stream.send(pb.MemberReport(**report))  # type: ignore[arg-type]

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
        """Handle the expiry of this incarnation: pause, drop all work, and be admitted again.

        If the coordinator has admitted it again already, only the lost work is dropped. Returns False when
        the ledger did not answer: the caller tries again.
        """
        self._was_expired = True  # ends a pause that lets work finish: that work belongs to others now
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
        elif pause.HasField("finish_through") and not self._paused:  # frozen requests would never finish
            with self._worker.trace.slice("let_finish", running=self._worker.running):
                await self._let_finish(pause.finish_through)
        if not self._paused:
            await self._answered(self._engine.pause(), "paused")
            self._paused_ns = time.monotonic_ns()
            self._worker.paused()
        self._report(paused=pb.MemberPaused(term=self.stream.term, round=pause.round))

    async def _let_finish(self, through: int) -> None:
        """Wait until samples with tokens of version `through` or older have ended, reporting progress.

        This terminates because the ledger holds back takes meanwhile.
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
        """Whether old samples still run, or a take is in flight, which may bring one too old to freeze."""
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
        self._report(ready=pb.MemberReady(term=self.stream.term, session=join.session))

    async def _load(self, load: pb.Load) -> None:
        trace = self._worker.trace
        try:
            with trace.slice("load", version=load.manifest.version):
                digest, load_s = await asyncio.wait_for(
                    self._engine.load(load.manifest), self._config.sync.transfer_timeout_s
                )
        except EngineFailed:
            raise
        except Exception as error:  # as above; the engine stays dirty until a full transfer succeeds
            self._failed(load.session, error)
            return
        self._report(
            loaded=pb.MemberLoaded(term=self.stream.term, session=load.session, digest=digest, load_s=load_s)
        )

    def _failed(self, session: int, error: BaseException) -> None:
        log.warning("transfer failed", extra={"session": session, "error": repr(error)[:500]})
        self._report(failed=pb.MemberFailed(term=self.stream.term, session=session, error=repr(error)[:2000]))

    async def _answered(self, verb: Awaitable[None], what: str) -> None:
        """Await `verb` within a deadline. Raises EngineFailed: nothing else notices an engine that hangs."""
        c = self._config.sync
        limit = c.pause_timeout_s + c.rendezvous_timeout_s  # it may still be in a rendezvous that is obsolete
        try:
            await asyncio.wait_for(verb, limit)
        except TimeoutError:
            raise EngineFailed(f"the engine has not {what} within {limit:g} s") from None

    async def _resume(self, resume: pb.Resume) -> None:
        await self._answered(self._engine.resume(resume.version), "resumed")
        self._worker.trace.complete("paused", self._paused_ns, time.monotonic_ns(), version=resume.version)
        self._worker.resumed(resume.version)
        metrics.VERSION.set(resume.version)
        if not resume.HasField("canary"):
            log.warning("resumed without a canary: results wait", extra={"version": resume.version})
            return
        difference = await asyncio.wait_for(
            self._engine.canary(resume.canary), self._config.sync.transfer_timeout_s
        )
        self._report(resumed=pb.MemberResumed(version=resume.version, canary_max_abs_diff=difference))
        if not difference <= self._config.canary_limit:  # `not <=` so that NaN fails too
            limit = self._config.canary_limit
            raise EngineFailed(
                f"after the sync to version {resume.version} the engine's log-probs differ from the "
                f"trainer's by {difference:.3g} (sync.canary_tolerance {limit:g})"
            )
        self._worker.trusted.set()

    async def leave(self) -> None:
        """Announce the departure, so that nobody waits for the lease to expire.

        The coordinator then ends the stream.
        """
        if self.connected:
            self.stream.send_last(pb.MemberReport(leaving=pb.MemberLeaving()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stream.ended.wait(), _LEAVE_S)


def _raise_if_expelled(command: pb.MemberCommand) -> None:
    if command.HasField("expelled"):
        raise Expelled(f"the coordinator refuses this rollouter: {command.expelled.reason}")
