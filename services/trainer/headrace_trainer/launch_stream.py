"""A node's side of one launch: waits for the other nodes, hears that it is over, tells how it ended.

A thread keeps the stream up. A broken one ends nothing: the ranks run on, and the coordinator, an old or a
new one, is told which launch they belong to.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import grpc

from headrace import coordinator_stream, tls
from headrace.coordinator_stream import Outage
from headrace.environment import bearer
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_trainer import heartbeat

log = logging.getLogger("headrace.trainer.launch")

_POLL_S = 0.2
_TELL_S = 5.0


class LaunchRefused(RuntimeError):
    """The coordinator does not take this node in, and asking again changes nothing."""


class LaunchStream:
    def __init__(self, address: str, token: str, node: str, nodes: int, store: str) -> None:
        """`node`: name of this launcher; `nodes`: how many there are to be; `store`: host:port of the store
        that this node would serve."""
        self._address = address
        self._metadata = bearer(token)
        self._node = node
        self._nodes = nodes
        self._store = store
        self._state = threading.Condition()
        self._launch: pb.NodeStart | None = None
        self._over: str | None = None
        self._refused = ""
        self._ended: int | None = None
        self._closed = threading.Event()
        self._out: queue.SimpleQueue[pb.NodeReport | None] = queue.SimpleQueue()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="launch-stream", daemon=True)
        self._thread.start()

    def wait(self, stopping: Callable[[], bool]) -> pb.NodeStart | None:
        """The launch, once all nodes are there, however long that takes: a node without its peers is a state,
        not an error. None when `stopping`. Raises LaunchRefused."""
        while not stopping():
            heartbeat.beat()
            with self._state:
                self._state.wait_for(lambda: self._launch or self._refused, _POLL_S)
                if self._refused:
                    raise LaunchRefused(self._refused)
                if self._launch:
                    return self._launch
        return None

    @property
    def over(self) -> str | None:
        """Why the launch is over for all nodes; None while it is not."""
        with self._state:
            return self._over

    def close(self, code: int | None = None) -> None:
        """The end of the stream. `code`: how the ranks ended, which the coordinator is told if it can be."""
        if code is not None:
            with self._state:
                self._ended = code
                self._out.put(pb.NodeReport(ended=pb.NodeEnded(code=code)))
            self._thread.join(_TELL_S)
        self._closed.set()
        self._out.put(None)
        if self._call is not None:
            self._call.cancel()
        self._thread.join(_TELL_S)

    # -- thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        outage = Outage(log)
        while not self._closed.is_set():
            out: queue.SimpleQueue[pb.NodeReport | None] = queue.SimpleQueue()
            with self._state:
                self._out = out
                launch = self._launch.launch if self._launch else ""
                hello = pb.NodeHello(node=self._node, nodes=self._nodes, launch=launch, store=self._store)
                out.put(pb.NodeReport(hello=hello))
                if self._ended is not None:
                    out.put(pb.NodeReport(ended=pb.NodeEnded(code=self._ended)))
            try:
                with tls.channel(self._address, coordinator_stream.CLIENT) as channel:
                    stub = sync_pb2_grpc.CoordinatorStub(channel)
                    self._call = stub.TrainerNode(iter(out.get, None), metadata=self._metadata)
                    self._call.initial_metadata()  # all that a node hears whose launch goes on
                    if self._call.is_active():
                        outage.up()
                    for command in self._call:
                        self._on(command)
                with self._state:
                    if self._over is not None or self._ended is not None:
                        return
                pause = outage.pause()
            except grpc.RpcError as error:
                if self._closed.is_set() or self._is_refusal(error):
                    return
                pause = outage.lost(address=self._address, code=str(_code(error)))
            except Exception as error:  # certificates that are just being replaced, say
                log.warning(
                    "coordinator stream failed",
                    extra={"address": self._address, "error": f"{type(error).__name__}: {error}"[:300]},
                    exc_info=None if isinstance(error, tls.TlsError) else error,
                )
                pause = outage.pause()
            finally:
                out.put(None)  # lets the sending side end
            self._closed.wait(pause)

    def _is_refusal(self, error: grpc.RpcError) -> bool:
        match _code(error):
            case grpc.StatusCode.UNAUTHENTICATED:
                why = f"the coordinator at {self._address} refuses the token (HEADRACE_TOKEN)"
            case grpc.StatusCode.FAILED_PRECONDITION if isinstance(error, grpc.Call):
                why = str(error.details())
            case _:
                return False
        with self._state:
            self._refused = why
            self._state.notify_all()
        return True

    def _on(self, command: pb.NodeCommand) -> None:
        match command.WhichOneof("command"):
            case "wait":
                wait = command.wait
                log.info("waiting for nodes", extra={"present": list(wait.present), "nodes": wait.nodes})
            case "start":
                with self._state:
                    self._launch = command.start
                    self._state.notify_all()
            case "stop":
                with self._state:
                    self._over = command.stop.reason


def _code(error: grpc.RpcError) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None
