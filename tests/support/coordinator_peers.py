"""Scripted ends of the coordinator's streams: a rollouter without an engine, a trainer without a model.

Both answer every command at once and as they should; a test makes one silent, lets it fail, lie or hang
up. The "weights" of version v have the digest `digest_of(manifest_of(v))` on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from headrace.connections.variables import bearer
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc

TOKEN = "a-token"
DEADLINE_S = 20.0
CANARY_DIFF = 0.25


def manifest_of(version: int) -> pb.Manifest:
    """A manifest that tells the versions apart."""
    return pb.Manifest(
        version=version, bytes=1000 + version, canary=pb.Canary(token_ids=[version + 1, 7], log_probs=[-0.5])
    )


def digest_of(manifest: pb.Manifest) -> str:
    return f"digest-{manifest.bytes}"


class HungUp(Exception):
    """Raised by an answer to end the stream instead."""


def hang_up(_: Any) -> Any:
    raise HungUp


class Peer:
    """One stream: what was heard, in order, and what is answered to it."""

    method: str
    report_type: type[Any]

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self.address = address
        self.token = token
        self.heard: list[Any] = []
        self.status: grpc.StatusCode | None = None
        """How the stream ended; None while it is open."""
        self.answers: dict[str, Callable[[Any], Any]] = {}
        """Answers that differ from the proper one, by command; None as an answer is silence."""
        self._read = 0
        self._news = asyncio.Event()
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self._channel: grpc.aio.Channel | None = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Open the stream, again if need be, as the same peer in its present state."""
        await self.close()
        self.status = None
        self._out = asyncio.Queue()
        self._channel = grpc.aio.insecure_channel(
            self.address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, as of a process of its own
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 200),
            ],
        )
        stub = sync_pb2_grpc.CoordinatorStub(self._channel)
        call = getattr(stub, self.method)(self._reports(), metadata=bearer(self.token), wait_for_ready=True)
        self.report(hello=self.hello())
        self._reader = asyncio.create_task(self._listen(call))

    async def close(self) -> None:
        """Hang up, as a killed process does."""
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
            self._reader = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def report(self, **report: Any) -> None:
        self._out.put_nowait(self.report_type(**report))

    async def _reports(self) -> AsyncIterator[Any]:
        out = self._out
        while True:
            yield await out.get()

    async def _listen(self, call: Any) -> None:
        try:
            async for command in call:
                self.heard.append(command)
                self._news.set()
                kind = command.WhichOneof("command")
                answer = self.answers.get(kind, lambda c, kind=kind: self.proper(kind, c))(command)
                if answer is not None:
                    self.report(**answer)
            self.status = await call.code()
        except HungUp:
            self.status = grpc.StatusCode.CANCELLED
        except grpc.aio.AioRpcError as error:
            self.status = error.code()
        finally:
            self.status = self.status or grpc.StatusCode.CANCELLED
            call.cancel()
            self._news.set()

    # -- what a test asks ------------------------------------------------------------------------

    async def expect(self, *kinds: str) -> list[Any]:
        """The next commands, which must be exactly these; their contents."""
        while True:
            self._news.clear()
            got = self.heard[self._read : self._read + len(kinds)]
            names = [command.WhichOneof("command") for command in got]
            assert names == list(kinds[: len(names)]), f"{self} heard {names}, not {kinds}"
            if len(names) == len(kinds):
                self._read += len(kinds)
                return [getattr(command, name) for command, name in zip(got, kinds, strict=True)]
            assert self.status is None, (
                f"{self} heard {names} of {kinds}, then the stream ended: {self.status}"
            )
            await self._wait(f"{kinds[len(names) :]} after {names}")

    async def ended(self) -> grpc.StatusCode:
        """The stream's status, once it has ended."""
        while self.status is None:
            self._news.clear()
            await self._wait("the end of the stream")
        return self.status

    async def _wait(self, what: str) -> None:
        try:
            await asyncio.wait_for(self._news.wait(), DEADLINE_S)
        except TimeoutError:
            raise AssertionError(f"{self} waited {DEADLINE_S:g} s for {what}") from None

    @property
    def unread(self) -> list[str]:
        """Commands that no `expect` has taken yet."""
        return [command.WhichOneof("command") for command in self.heard[self._read :]]

    def answer(self, kind: str) -> None:
        """Give the proper answer to the last command of this kind, which was met with silence."""
        last = next(c for c in reversed(self.heard) if c.WhichOneof("command") == kind)
        answer = self.proper(kind, last)
        assert answer is not None, f"nothing answers {kind}"
        self.report(**answer)

    def silence(self, *kinds: str) -> None:
        for kind in kinds:
            self.answers[kind] = lambda _: None

    # -- what the peers differ in ----------------------------------------------------------------

    def hello(self) -> Any:
        raise NotImplementedError

    def proper(self, kind: str, command: Any) -> dict[str, Any] | None:
        raise NotImplementedError


class Member(Peer):
    """A rollouter. Like a real one it stamps the version at resume and stays paused without a stream."""

    method, report_type = "Member", pb.MemberReport

    def __init__(
        self,
        address: str,
        name: str,
        workers: int = 1,
        version: int = -1,
        paused: bool = True,
        nccl: str = "",
    ) -> None:
        super().__init__(address)
        self.name = name
        self.workers = workers
        self.version = version
        self.paused = paused
        self.nccl = nccl

    def __str__(self) -> str:
        return f"member {self.name}"

    def hello(self) -> pb.MemberHello:
        return pb.MemberHello(
            incarnation=self.name,
            workers=self.workers,
            version=self.version,
            paused=self.paused,
            nccl=self.nccl,
        )

    def proper(self, kind: str, command: pb.MemberCommand) -> dict[str, Any] | None:
        term = command.term
        match kind:
            case "pause":
                self.paused = True
                return {"paused": pb.MemberPaused(term=term, round=command.pause.round)}
            case "join":
                assert self.paused, f"{self} joins while it runs"
                return {"ready": pb.MemberReady(term=term, session=command.join.session)}
            case "load":
                assert self.paused, f"{self} loads while it runs"
                return self.loaded(command, digest_of(command.load.manifest))
            case "resume":
                self.version, self.paused = command.resume.version, False
                return {
                    "resumed": pb.MemberResumed(version=self.version, canary_max_abs_diff=CANARY_DIFF),
                }
        return None

    def loaded(self, command: pb.MemberCommand, digest: str) -> dict[str, Any]:
        return {"loaded": pb.MemberLoaded(term=command.term, session=command.load.session, digest=digest)}

    def failed(self, command: pb.MemberCommand, session: int) -> dict[str, Any]:
        return {"failed": pb.MemberFailed(term=command.term, session=session, error="it was unlucky")}


class Trainer(Peer):
    """Rank 0 of a trainer."""

    method, report_type = "Trainer", pb.TrainerReport

    def __init__(self, address: str, lineage: int, snapshot: int = -1, nccl: str = "") -> None:
        super().__init__(address)
        self.nccl = nccl
        self.lineage = lineage
        self.served = snapshot
        """The committed version that it can serve; -1 for none."""
        self.snapshot = snapshot
        self._step = 0

    def __str__(self) -> str:
        return f"trainer of lineage {self.lineage}"

    def hello(self) -> pb.TrainerHello:
        return pb.TrainerHello(
            lineage=self.lineage,
            store_host="127.0.0.1",
            store_port=1,
            snapshot_version=self.served,
            manifest=manifest_of(self.served) if self.served >= 0 else None,
            nccl=self.nccl,
        )

    def begin(self, version: int, validate: bool = False, wait_s: float = 0.0, step_s: float = 0.0) -> None:
        """Ask for a round; repeated for the same version it is the same request."""
        self.snapshot = version
        self.report(
            begin=pb.BeginSync(
                lineage=self.lineage,
                optimizer_step=version,
                version=version,
                manifest=manifest_of(version),
                validate=validate,
                wait_s=wait_s,
                step_s=step_s,
            )
        )

    def proper(self, kind: str, command: pb.TrainerCommand) -> dict[str, Any] | None:
        match kind:
            case "form":
                return {"ready": pb.TrainerReady(term=command.term, session=command.form.session)}
            case "send":
                digest = digest_of(manifest_of(self.snapshot))
                return {
                    "sent": pb.TrainerSent(term=command.term, session=command.send.session, digest=digest)
                }
            case "committed":
                self.served = command.committed.version
        return None

    def failed(self, command: pb.TrainerCommand) -> dict[str, Any]:
        return {
            "failed": pb.TrainerFailed(term=command.term, session=command.send.session, error="cannot send")
        }
