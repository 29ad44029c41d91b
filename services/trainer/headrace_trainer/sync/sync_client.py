"""Rank 0's side of the coordinator's stream: requests rounds and serves them from the snapshot.

After a reconnect an unanswered request is sent again (requests are idempotent). The training loop only calls
`begin`, `committed` and `tuning`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from headrace.config.staleness import StalenessRule
from headrace.connections.tls import TlsError
from headrace.service.coordinator_stream import CoordinatorRefused, TokenRefused
from headrace.service.reconnecting_stream import (
    ReconnectingStream,
    StreamThread,
)
from headrace.service.work_thread import WorkThread
from headrace.v1 import sync_pb2 as pb
from headrace.weights.transports import CommunicatorError
from headrace_trainer.records import metrics
from headrace_trainer.sync.weight_server import MovedOn, WeightServer

log = logging.getLogger("headrace.trainer.sync")

_CLOSE_S = 10.0
_WELCOME_S = 60.0
"""How long the coordinator may take to answer before the first round is begun without its word."""


class SyncFailed(RuntimeError):
    """The coordinator abandoned the round, or did not answer in time."""


class SyncRefused(SyncFailed):
    """The coordinator cannot be reached with this service's configuration."""


class SyncClient:
    def __init__(
        self,
        server: WeightServer,
        lineage: int,
        store_host: str,
        store_port: int,
        address: str,
        token: str,
        on_canary: Callable[[pb.CanaryReport], None],
        nccl: str = "",
        certificates_s: float = 0.0,
    ) -> None:
        self._server = server
        self._lineage = lineage
        self._store = (store_host, store_port)
        self._on_canary = on_canary
        self._nccl = nccl
        self._state = threading.Condition()
        self._waiting: pb.BeginSync | None = None
        """The request of the training loop that is not answered yet."""
        self._committed: pb.Committed | None = None
        self._failure: SyncFailed | None = None
        self._tuning: pb.Tuning | None = None
        self._welcome = False
        """Whether a coordinator has answered."""
        # Only the stream's thread uses these.
        self._asked: pb.BeginSync | None = None
        """The same request, from when the thread knows it: each connection sends it once."""
        self._served: tuple[int, pb.Manifest] = (-1, pb.Manifest())
        self._bucket_bytes = 0
        self._stream: ReconnectingStream[pb.TrainerReport, pb.TrainerCommand] = ReconnectingStream(
            address, token, "Trainer", self._hello, self._on, log=log, certificates_s=certificates_s
        )
        self._work = WorkThread("weight-transfer")
        self._thread = StreamThread(self._stream, "sync-client", self._stream_failed)

    # -- training loop ---------------------------------------------------------------------------

    def begin(self, request: pb.BeginSync) -> None:
        """Request a round that brings all members to `request.version`. Returns at once."""
        with self._state:
            assert self._waiting is None, "one round at a time"
            self._waiting = request
            self._committed = None
        self._thread.call(self._ask, request)

    def committed(self, wait_s: float = 0.0) -> pb.Committed | None:
        """The commit of the last requested round, if it arrives within `wait_s` seconds, or SyncFailed."""
        with self._state:
            self._state.wait_for(lambda: self._committed is not None or self._failure is not None, wait_s)
            if self._failure is not None:
                raise self._failure
            return self._committed

    def tuning(self, rule: StalenessRule) -> tuple[int, float]:
        """The S and eta wanted now; those of `rule` if the coordinator sets none. Waits for its answer,
        because `rule` may come from a file that was refused."""
        with self._state:
            self._state.wait_for(lambda: self._welcome or self._failure is not None, _WELCOME_S)
            found = self._tuning
        return (found.sync_steps, found.staleness_threshold) if found else (rule.sync_steps, rule.threshold)

    def close(self) -> None:
        self._thread.close(_CLOSE_S)
        self._work.close()

    # -- thread ----------------------------------------------------------------------------------

    def _hello(self) -> list[pb.TrainerReport]:
        version, manifest = self._served
        hello = pb.TrainerHello(
            lineage=self._lineage,
            store_host=self._store[0],
            store_port=self._store[1],
            snapshot_version=version,
            manifest=manifest,
            nccl=self._nccl,
        )
        again = [] if self._asked is None else [pb.TrainerReport(begin=self._asked)]
        return [pb.TrainerReport(hello=hello), *again]

    def _ask(self, request: pb.BeginSync) -> None:
        self._asked = request
        self._bucket_bytes = request.manifest.bucket_bytes
        self._stream.send(pb.TrainerReport(begin=request))

    async def _on(self, command: pb.TrainerCommand) -> None:
        kind = command.WhichOneof("command")
        if kind in ("form", "send"):
            metrics.CLOCK.transfer_begins(time.monotonic())
        match kind:
            case "form":
                await self._form(command.form)
            case "send":
                await self._send(command.send)
            case "committed":
                self._on_committed(command.committed)
            case "welcome":
                self._tune(command.welcome.tuning)
            case "tuning":
                self._tune(command.tuning)
            case "rejected":
                self._fail(SyncFailed(command.rejected.reason))
            case "canary":
                self._on_canary(command.canary)

    def _on_committed(self, committed: pb.Committed) -> None:
        with self._state:
            waiting = self._waiting
            if waiting is not None and committed.version < waiting.version:
                return  # a duplicate answer to an earlier request, around a reconnect
            if waiting is not None:
                self._served = (waiting.version, waiting.manifest)
            self._waiting = None
            self._committed = committed
            self._state.notify_all()
        self._asked = None

    def _tune(self, wanted: pb.Tuning) -> None:
        with self._state:
            self._welcome = True
            self._tuning = wanted if wanted.sync_steps else self._tuning
            self._state.notify_all()

    async def _form(self, form: pb.FormGroup) -> None:
        try:
            await self._work.call(self._server.form, form.rendezvous)
        except CommunicatorError as error:
            self._report_failure(form.session, error)
            return
        ready = pb.TrainerReady(term=self._stream.term, session=form.session)
        self._stream.send(pb.TrainerReport(ready=ready))

    async def _send(self, send: pb.Send) -> None:
        try:
            digest, seconds = await self._work.call(self._server.send, send.version, self._bucket_bytes)
        except CommunicatorError as error:
            self._report_failure(send.session, error)
            return
        sent = pb.TrainerSent(term=self._stream.term, session=send.session, digest=digest, transfer_s=seconds)
        self._stream.send(pb.TrainerReport(sent=sent))

    def _report_failure(self, session: int, error: Exception) -> None:
        log.warning("transfer failed", extra={"session": session, "error": str(error)[:500]})
        failed = pb.TrainerFailed(
            term=self._stream.term,
            session=session,
            error=str(error)[:2000],
            moved_on=isinstance(error, MovedOn),
        )
        self._stream.send(pb.TrainerReport(failed=failed))

    def _stream_failed(self, error: Exception) -> None:
        """Hand `error` to the training loop, which would otherwise wait in vain."""
        if isinstance(error, TokenRefused | CoordinatorRefused | TlsError):
            self._fail(SyncRefused(str(error)))
            return
        log.error("sync client failed", exc_info=error)
        self._fail(SyncFailed(f"sync client failed: {error!r}"))

    def _fail(self, failure: SyncFailed) -> None:
        with self._state:
            self._failure = failure
            self._state.notify_all()
