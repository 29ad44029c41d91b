"""A node's side of one launch: waits for the other nodes, learns when it is over, reports how it ended.

A broken stream ends nothing: the ranks keep running. After a reconnect the coordinator, the same or a new
one, is told which launch they belong to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from headrace.service.reconnecting_stream import ReconnectingStream, StreamThread
from headrace.v1 import sync_pb2 as pb
from headrace_trainer.distributed import heartbeat

log = logging.getLogger("headrace.trainer.launch")

_POLL_S = 0.2
_TELL_S = 5.0


class LaunchStream:
    def __init__(
        self, address: str, token: str, node: str, nodes: int, store: str, certificates_s: float = 0.0
    ) -> None:
        """`node`: name of this launcher; `nodes`: how many there are to be; `store`: host:port of the store
        that this node would serve; `certificates_s`: see ReconnectingStream."""
        self._node = node
        self._nodes = nodes
        self._store = store
        self._state = threading.Condition()
        self._launch: pb.NodeStart | None = None
        self._over: str | None = None
        self._failure: Exception | None = None
        self._ended: int | None = None
        self._stream: ReconnectingStream[pb.NodeReport, pb.NodeCommand] = ReconnectingStream(
            address, token, "TrainerNode", self._hello, self._on, log=log, certificates_s=certificates_s
        )
        self._thread = StreamThread(self._stream, "launch-stream", self._failed)

    def wait(self, stopping: Callable[[], bool]) -> pb.NodeStart | None:
        """The launch, once all nodes are present, however long that takes: missing peers are not an error.
        None when `stopping`. Raises the error that ended the stream (see ReconnectingStream)."""
        while not stopping():
            heartbeat.beat()
            with self._state:
                self._state.wait_for(lambda: self._launch or self._failure, _POLL_S)
                if self._failure is not None:
                    raise self._failure
                if self._launch:
                    return self._launch
        return None

    @property
    def over(self) -> str | None:
        """Why the launch is over for this node; None while it is not. It is also over once the stream has
        failed for good: the node would not learn that its peers are gone."""
        with self._state:
            return self._over or (str(self._failure) if self._failure is not None else None)

    def close(self, code: int | None = None) -> None:
        """End the stream. `code`: exit code of the ranks, reported to the coordinator if it is reachable."""
        if code is not None:
            self._thread.call(self._tell_end, code)
            self._thread.join(_TELL_S)
        self._thread.close(_TELL_S)

    # -- thread ----------------------------------------------------------------------------------

    def _hello(self) -> list[pb.NodeReport]:
        launch = self._launch.launch if self._launch else ""
        hello = pb.NodeHello(node=self._node, nodes=self._nodes, launch=launch, store=self._store)
        return [pb.NodeReport(hello=hello), *([] if self._ended is None else [_end(self._ended)])]

    def _tell_end(self, code: int) -> None:
        self._ended = code
        self._stream.send_last(_end(code))

    async def _on(self, command: pb.NodeCommand) -> None:
        match command.WhichOneof("command"):
            case "wait":
                wait = command.wait
                log.info("waiting for nodes", extra={"present": list(wait.present), "nodes": wait.nodes})
            case "start":
                with self._state:
                    self._launch = command.start
                    self._state.notify_all()
            case "stop":
                self._stream.expect_the_end()
                with self._state:
                    self._over = command.stop.reason

    def _failed(self, error: Exception) -> None:
        with self._state:
            self._failure = error
            self._state.notify_all()


def _end(code: int) -> pb.NodeReport:
    return pb.NodeReport(ended=pb.NodeEnded(code=code))
