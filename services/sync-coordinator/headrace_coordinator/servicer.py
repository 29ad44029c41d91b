"""gRPC front end of the driver: turns stream messages into calls and commands into messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from headrace.connections.variables import token_matches
from headrace.ledger import keys
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_coordinator.connections import MemberConnection, TrainerConnection
from headrace_coordinator.launches import Launches, Node
from headrace_coordinator.rounds import session as s
from headrace_coordinator.rounds.driver import Driver

C = TypeVar("C")
log = logging.getLogger("headrace.coordinator")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses Headrace calls without the shared token. Health and reflection stay open for probes."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = dict(details.invocation_metadata or ()).get("authorization")
        if details.method.startswith("/headrace.v1.") and not token_matches(given, self._token):
            handler = await continuation(details)
            if handler is None:
                return None  # there is no such method

            async def refuse(_: Any, context: grpc.aio.ServicerContext) -> Any:
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token (HEADRACE_TOKEN)"
                )

            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(refuse)
            return grpc.unary_unary_rpc_method_handler(refuse)
        return await continuation(details)


class CoordinatorServicer(sync_pb2_grpc.CoordinatorServicer):
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._reports = driver.reports
        self.launches = Launches(driver.config.trainer.nnodes)
        self._open: set[asyncio.Queue[Any]] = set()
        """Outgoing queues of the open streams. None ends a stream."""

    def close(self) -> None:
        """End all streams in an orderly way, before the server breaks them off."""
        for outgoing in self._open:
            outgoing.put_nowait(None)

    async def _commands(self, outgoing: asyncio.Queue[C | None]) -> AsyncIterator[C]:
        self._open.add(outgoing)
        try:
            while (command := await outgoing.get()) is not None:
                yield command
        finally:
            self._open.discard(outgoing)

    async def Member(
        self, request_iterator: AsyncIterator[pb.MemberReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.MemberCommand]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("report") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first report must be a hello")
            return
        hello = first.hello
        if not keys.is_name(hello.incarnation):  # the ledger would refuse it, in the middle of a round
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"an incarnation is {keys.NAME}")
            return
        connection = MemberConnection(
            hello.incarnation, max(hello.workers, 1), hello.version, hello.paused, nccl=hello.nccl
        )
        log.info("member connected", extra={"member": hello.incarnation, "version": hello.version})
        reader: asyncio.Task[None] | None = None
        try:
            await self._reports.member_joined(connection)
            reader = asyncio.create_task(self._read_member(connection, request_iterator))
            async for command in self._commands(connection.outgoing):
                yield command
        finally:
            if reader is not None:
                reader.cancel()
            self._reports.member_left(connection)

    async def _read_member(self, c: MemberConnection, reports: AsyncIterator[pb.MemberReport]) -> None:
        try:
            async for report in reports:
                await self._on_member(c, report)
        except asyncio.CancelledError:
            raise
        except Exception:  # a broken stream must end the other direction too, whatever broke it
            log.exception("member stream failed", extra={"member": c.incarnation})
        finally:
            c.outgoing.put_nowait(None)

    async def _on_member(self, c: MemberConnection, report: pb.MemberReport) -> None:
        d, name = self._reports, c.incarnation
        match report.WhichOneof("report"):
            case "paused" if report.paused.term == self._driver.term:
                d.paused(c, report.paused.round)
            case "ready" if (attempt := d.transfers.attempt_of(report.ready.session)) is not None:
                d.transfers.event(s.Ready(name, attempt))
            case "loaded" if (attempt := d.transfers.attempt_of(report.loaded.session)) is not None:
                d.transfers.event(s.Loaded(name, attempt, report.loaded.digest))
            case "failed" if (attempt := d.transfers.attempt_of(report.failed.session)) is not None:
                log.warning("member failed", extra={"member": name, "error": report.failed.error[:500]})
                d.transfers.event(s.RoundFailed(name, attempt, report.failed.error))
            case "progress":
                d.progress(c, report.progress.tokens)
            case "resumed":
                d.canary(c, report.resumed)
            case "leaving":
                await d.member_leaving(c)

    async def Trainer(
        self, request_iterator: AsyncIterator[pb.TrainerReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TrainerCommand]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("report") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first report must be a hello")
            return
        hello = first.hello
        connection = TrainerConnection(
            hello.lineage,
            hello.store_host,
            hello.store_port,
            snapshot_version=hello.snapshot_version,
            nccl=hello.nccl,
        )
        if why := await self._reports.trainer_joined(connection, hello.manifest):
            log.warning("trainer refused", extra={"lineage": hello.lineage, "why": why})
            yield pb.TrainerCommand(term=self._driver.term, rejected=pb.Rejected(reason=why))
            return
        log.info("trainer connected", extra={"lineage": hello.lineage})
        reader = asyncio.create_task(self._read_trainer(connection, request_iterator))
        try:
            async for command in self._commands(connection.outgoing):
                yield command
        finally:
            reader.cancel()
            self._reports.trainer_left(connection)

    async def _read_trainer(self, c: TrainerConnection, reports: AsyncIterator[pb.TrainerReport]) -> None:
        d = self._reports
        try:
            async for report in reports:
                match report.WhichOneof("report"):
                    case "begin":
                        d.begin(c, report.begin)
                    case "ready" if (attempt := d.transfers.attempt_of(report.ready.session)) is not None:
                        d.transfers.event(s.Ready(s.TRAINER, attempt))
                    case "sent" if (attempt := d.transfers.attempt_of(report.sent.session)) is not None:
                        d.transfers.event(s.Sent(attempt, report.sent.digest))
                    case "failed" if (attempt := d.transfers.attempt_of(report.failed.session)) is not None:
                        log.warning("trainer failed to send", extra={"error": report.failed.error[:500]})
                        failure = s.RoundFailed(s.TRAINER, attempt, report.failed.error)
                        d.transfers.event(s.TrainerLost() if report.failed.moved_on else failure)
        except asyncio.CancelledError:
            raise
        except Exception:  # as for members
            log.exception("trainer stream failed")
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                c.outgoing.put_nowait(None)

    async def TrainerNode(
        self, request_iterator: AsyncIterator[pb.NodeReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.NodeCommand]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("report") != "hello" or not first.hello.node:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first report must be a hello")
            return
        hello, launches = first.hello, self.launches
        if hello.nodes != launches.nodes:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"trainer.nnodes is {hello.nodes} on {hello.node} and {launches.nodes} here: give all "
                "services the same configuration",
            )
            return
        node = Node(hello.node, hello.store)
        await context.send_initial_metadata(())  # it is connected, though there may be nothing to say
        launches.joined(node, hello.launch)
        reader = asyncio.create_task(self._read_node(node, request_iterator))
        try:
            async for command in self._commands(node.outgoing):
                yield command
        finally:
            reader.cancel()
            launches.left(node)

    async def _read_node(self, node: Node, reports: AsyncIterator[pb.NodeReport]) -> None:
        try:
            async for report in reports:
                if report.WhichOneof("report") == "ended":
                    self.launches.ended(node, report.ended.code)
        except asyncio.CancelledError:
            raise
        except Exception:  # as for members
            log.exception("stream of a trainer node failed", extra={"node": node.name})
        finally:
            node.outgoing.put_nowait(None)

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatusReply:
        d, session = self._driver, self._driver.transfers.session
        return pb.GetStatusReply(
            term=d.term,
            round=d.state.round,
            phase=str(session.phase) if session else "idle",
            version=d.state.version,
            members=sorted(d.roster.members),
            joiners=sorted(d.roster.joiners()),
            trainer_connected=d.trainer is not None,
            waiting_for=sorted(session.waiting) if session else [],
        )
