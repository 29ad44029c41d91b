"""Serves the committed snapshot. Every rank runs a server in its own thread.

Rank 0 sends `gather` or `stop` through a store, and the other ranks follow. Gathers use their own process
group, so they never mix with the training step's collectives. Only rank 0 talks to the engines.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.v1 import sync_pb2 as pb
from headrace.weights.snapshot import Snapshot
from headrace.weights.transports import Communicator, CommunicatorError, connect
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks

log = logging.getLogger("headrace.trainer.weights")

_UNTIL_TOLD = timedelta(days=20)
"""For a wait that the next word ends, or rank 0's end, which closes the connection. Each time-out would leave
two lines of the store in the log, and poll(2) knows none longer than 24 days."""
_TURN_S = 5.0
_HEARD = "heard"
"""Counts the followers that have heard the last word."""
_POLL_S = 0.02
_DISMISS_S = 1.0


class MovedOn(CommunicatorError):
    """The snapshot has become another version."""


class WeightServer:
    """On rank 0: `form` and `send`, called by one thread of the sync client. Elsewhere: a follower thread."""

    def __init__(self, snapshot: Snapshot, store: dist.Store, ranks: Ranks) -> None:
        self.snapshot = snapshot
        self._store = dist.PrefixStore("weight-server", store)
        self._ranks = ranks
        self._issued = 0
        self.version = -1
        """Policy version of the snapshot."""
        self._comm: Communicator | None = None
        self._lock = threading.Lock()  # held while the snapshot is read (rank 0) or written
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not ranks.is_first:
            self._thread = threading.Thread(target=self._follow, name="weight-server", daemon=True)
            self._thread.start()

    # -- every rank ------------------------------------------------------------------------------

    def write_snapshot(self, version: int) -> None:
        """Make the live parameters `version`. All ranks together, with no transfer in progress."""
        while self._ranks.is_first and not self._lock.acquire(timeout=_TURN_S):
            heartbeat.beat()  # a late joiner is being sent the previous version
        try:
            self._ranks.meet()
            self.snapshot.write()
            self.version = version
            self._ranks.meet()
        finally:
            if self._ranks.is_first:
                self._lock.release()

    def check(self) -> None:
        """Raises if the follower thread of this rank has failed."""
        if self.failure is not None:
            raise RuntimeError(f"weight server of rank {self._ranks.rank} failed") from self.failure

    def close(self) -> None:
        if self._ranks.is_first:
            self.dismiss()
            self._drop_group()
        elif self._thread is not None:
            self._thread.join(timeout=2 * _TURN_S)

    # -- followers -------------------------------------------------------------------------------

    def _follow(self) -> None:
        heard = 0
        try:
            while True:
                key = f"command/{heard}"
                try:
                    self._store.wait([key], _UNTIL_TOLD)
                except dist.DistStoreError:  # no command within the store's timeout
                    continue
                heard += 1
                if self._store.get(key) == b"stop":
                    self._store.add(_HEARD, 1)
                    return
                for _ in self.snapshot.gather():
                    pass
        except dist.DistNetworkError as error:  # rank 0 is gone, and the launch with it
            self.failure = error
        except BaseException as error:  # kept for `check`: the training loop raises it
            log.exception("weight server failed")
            self.failure = error

    # -- rank 0 ----------------------------------------------------------------------------------

    def dismiss(self) -> None:
        """Tell the followers to stop, also after a failure. Otherwise each finds a broken connection, about
        which the store logs a page. Not during a transfer: followers that gather do not listen."""
        if self._ranks.is_first and self._lock.acquire(timeout=_DISMISS_S):
            try:
                self._say("stop")
                deadline = time.monotonic() + _DISMISS_S
                while self._store.add(_HEARD, 0) < self._ranks.world_size - 1 and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
            finally:
                self._lock.release()

    def _say(self, word: str) -> None:
        self._store.set(f"command/{self._issued}", word)
        self._issued += 1

    def _drop_group(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def form(self, r: pb.Rendezvous) -> None:
        """Close the old communicator and join the engines of a new group epoch. Raises CommunicatorError."""
        self._drop_group()
        if r.world_size > 1:
            self._comm = connect(
                r.transport, r.host, r.port, r.epoch, 0, r.world_size, r.timeout_s, self._ranks.device
            )

    def send(self, version: int, bucket_bytes: int) -> tuple[str, float]:
        """Gather unit by unit and broadcast to the group. Returns (digest, seconds).

        Raises MovedOn if the snapshot is no longer `version` (a catch-up that came too late), and
        CommunicatorError. Without a group (no engine to send to) the digest is still computed.
        """
        began = time.monotonic()
        digest = hashlib.sha256()
        error: CommunicatorError | None = None
        with self._lock:
            if version != self.version:
                self._drop_group()  # peers waiting for a broadcast see the failure
                raise MovedOn(f"version {version} was asked for, the snapshot is {self.version}")
            self._say("gather")
            for packed in self.snapshot.gather():
                assert packed is not None  # rank 0 gets every unit
                digest.update(packed.numpy().data)
                if self._comm is None or error is not None:
                    continue  # the followers keep gathering: stay in step to the end
                try:
                    self._broadcast(self._comm, packed, bucket_bytes)
                except CommunicatorError as caught:
                    error = caught
        if error is not None:
            self._drop_group()
            raise error
        return digest.hexdigest(), time.monotonic() - began

    def _broadcast(self, comm: Communicator, packed: torch.Tensor, bucket_bytes: int) -> None:
        for start in range(0, packed.numel(), bucket_bytes):
            comm.broadcast(packed[start : start + bucket_bytes])
