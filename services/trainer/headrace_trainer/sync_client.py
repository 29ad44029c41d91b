"""Rank 0's side of the coordinator's stream: asks for rounds, serves them from the snapshot.

A thread keeps the stream up; whenever it comes back, an unanswered request is sent again (requests
are idempotent). The training loop only calls `begin` and `wait`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from headrace import coordinator_stream, tls
from headrace.comm import CommunicatorError
from headrace.coordinator_stream import Outage
from headrace.environment import bearer
from headrace.staleness import StalenessRule
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_trainer import metrics
from headrace_trainer.weight_server import MovedOn, WeightServer

log = logging.getLogger("headrace.trainer.sync")

_WELCOME_S = 60.0
"""How long the coordinator may take to answer before the first round is begun without its word."""


class SyncFailed(RuntimeError):
    """The coordinator gave the round up, or did not answer in time."""


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
    ) -> None:
        self._server = server
        self._lineage = lineage
        self._store = (store_host, store_port)
        self._address = address
        self._metadata = bearer(token)
        self._on_canary = on_canary
        self._nccl = nccl
        self._out: queue.SimpleQueue[pb.TrainerReport | None] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._pending: pb.BeginSync | None = None
        self._served: tuple[int, pb.Manifest] = (-1, pb.Manifest())
        self._committed: pb.Committed | None = None
        self._failure: str | None = None
        self._bucket_bytes = 0
        self._tuning: pb.Tuning | None = None
        self._welcome = False
        """Whether a coordinator has answered."""
        self._term = 0
        self._outage = Outage(log)
        self._stop = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="sync-client", daemon=True)
        self._thread.start()

    # -- training loop ---------------------------------------------------------------------------

    def begin(self, request: pb.BeginSync) -> None:
        """Ask for a round that brings everybody to `request.version`; returns at once."""
        with self._state:
            assert self._pending is None, "one round at a time"
            self._pending = request
            self._committed = None
            self._bucket_bytes = request.manifest.bucket_bytes
            # Inside the lock: a stream that reconnects just now sends it itself.
            self._out.put(pb.TrainerReport(begin=request))

    @property
    def pending(self) -> bool:
        with self._state:
            return self._pending is not None

    def committed(self, wait_s: float = 0.0) -> pb.Committed | None:
        """The commit of the round begun last, if it comes within `wait_s` seconds. Raises SyncFailed."""
        with self._state:
            self._state.wait_for(lambda: self._committed is not None or self._failure is not None, wait_s)
            if self._failure is not None:
                raise SyncFailed(self._failure)
            return self._committed

    def tuning(self, rule: StalenessRule) -> tuple[int, float]:
        """S and eta as they are wanted by now; those of `rule` when nobody says. Waits for the coordinator's
        word: what `rule` was read from may be a file that was refused."""
        with self._state:
            self._state.wait_for(lambda: self._welcome or self._failure is not None, _WELCOME_S)
            found = self._tuning
        return (found.sync_steps, found.staleness_threshold) if found else (rule.sync_steps, rule.threshold)

    def close(self) -> None:
        self._stop.set()
        self._out.put(None)
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=10.0)

    # -- thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with tls.channel(self._address, coordinator_stream.CLIENT) as channel:
                    self._stream(sync_pb2_grpc.CoordinatorStub(channel))
                pause = self._outage.pause()
            except grpc.RpcError as error:
                code = error.code() if isinstance(error, grpc.Call) else error
                if code is grpc.StatusCode.UNAUTHENTICATED:
                    self._fail(f"the coordinator at {self._address} refuses the token (HEADRACE_TOKEN)")
                    return
                if self._stop.is_set():
                    return
                details = error.details() if isinstance(error, grpc.Call) else None
                pause = self._outage.lost(code=str(code), details=details)
            except Exception as error:  # the training loop must hear of it, or it would wait in vain
                log.exception("sync client failed")
                self._fail(f"sync client failed: {error!r}")
                return
            self._stop.wait(pause)

    def _stream(self, stub: sync_pb2_grpc.CoordinatorStub) -> None:
        out: queue.SimpleQueue[pb.TrainerReport | None] = queue.SimpleQueue()
        version, manifest = self._served
        out.put(
            pb.TrainerReport(
                hello=pb.TrainerHello(
                    lineage=self._lineage,
                    store_host=self._store[0],
                    store_port=self._store[1],
                    snapshot_version=version,
                    manifest=manifest,
                    nccl=self._nccl,
                )
            )
        )
        with self._state:
            self._out = out
            if self._pending is not None:
                out.put(pb.TrainerReport(begin=self._pending))

        def outgoing() -> Iterator[pb.TrainerReport]:
            while (report := out.get()) is not None:
                yield report

        self._call = stub.Trainer(outgoing(), metadata=self._metadata)
        try:
            for command in self._call:
                self._outage.up()
                if command.term >= self._term:
                    self._term = command.term
                    self._on(command)
        finally:
            out.put(None)  # lets the sending side end

    def _on(self, command: pb.TrainerCommand) -> None:
        kind = command.WhichOneof("command")
        if kind in ("form", "send"):
            metrics.CLOCK.transfer_begins(time.monotonic())
        match kind:
            case "form":
                form = command.form
                try:
                    self._server.form(form.rendezvous)
                except CommunicatorError as error:
                    self._report_failure(form.session, error)
                else:
                    self._out.put(
                        pb.TrainerReport(ready=pb.TrainerReady(term=self._term, session=form.session))
                    )
            case "send":
                self._send(command.send)
            case "committed":
                with self._state:
                    if self._pending is not None and command.committed.version < self._pending.version:
                        return  # the answer to an earlier request, sent again around a reconnect
                    if self._pending is not None:
                        self._served = (self._pending.version, self._pending.manifest)
                    self._pending = None
                    self._committed = command.committed
                    self._state.notify_all()
            case "welcome":
                self._tune(command.welcome.tuning)
            case "tuning":
                self._tune(command.tuning)
            case "rejected":
                self._fail(command.rejected.reason)
            case "canary":
                self._on_canary(command.canary)

    def _tune(self, wanted: pb.Tuning) -> None:
        with self._state:
            self._welcome = True
            self._tuning = wanted if wanted.sync_steps else self._tuning
            self._state.notify_all()

    def _send(self, send: pb.Send) -> None:
        try:
            digest, seconds = self._server.send(send.version, self._bucket_bytes)
        except CommunicatorError as error:
            self._report_failure(send.session, error)
            return
        self._out.put(
            pb.TrainerReport(
                sent=pb.TrainerSent(term=self._term, session=send.session, digest=digest, transfer_s=seconds)
            )
        )

    def _report_failure(self, session: int, error: Exception) -> None:
        log.warning("transfer failed", extra={"session": session, "error": str(error)[:500]})
        self._out.put(
            pb.TrainerReport(
                failed=pb.TrainerFailed(
                    term=self._term,
                    session=session,
                    error=str(error)[:2000],
                    moved_on=isinstance(error, MovedOn),
                )
            )
        )

    def _fail(self, reason: str) -> None:
        with self._state:
            self._failure = reason
            self._state.notify_all()
