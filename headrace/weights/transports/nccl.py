"""NCCL communicator by NVIDIA's own bindings (nccl4py), non-blocking so that every wait has a deadline.

A rank stuck inside NCCL never returns by itself; here nothing is entered that blocks: progress is
polled, and past the deadline the communicator is aborted.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.weights.transports.communicator import CommunicatorError

_POLL_S = 0.0005


def bindings() -> Any:
    """nccl4py. Raises CommunicatorError when it is not installed."""
    try:
        import nccl.core as nccl
    except ImportError as error:
        raise CommunicatorError(
            "sync.transport: nccl needs the package nccl4py (pip install -e '.[cuda]' in the checkout)"
        ) from error
    return nccl


def loaded_version() -> str:
    """Version of the libnccl.so.2 that nccl4py loads: the wheel's, as in torch. `torch.cuda.nccl.version()`
    is that of the headers torch was built with, which may differ. Needs no GPU."""
    library = bindings().get_version().libnccl
    if library is None:
        raise CommunicatorError(
            "sync.transport: nccl: no libnccl.so.2 can be loaded; install nvidia-nccl-cu13 in the version of "
            "docker/locks/nccl.txt"
        )
    return str(library.version)


class NcclCommunicator:
    """One NCCL communicator per group epoch, on a stream of its own."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        store_host: str,
        device: torch.device,
    ) -> None:
        nccl = bindings()
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.device = device
        self._nccl = nccl
        self._comm: Any = None
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        try:
            if rank == 0:
                store.set("nccl_id", bytes(nccl.get_unique_id()).hex())
            else:
                store.wait(["nccl_id"], timedelta(seconds=timeout_s))
            unique = nccl.UniqueId.from_bytes(bytes.fromhex(store.get("nccl_id").decode()))
            self._comm = nccl.Communicator.init(
                nranks=world_size, rank=rank, unique_id=unique, config=nccl.NCCLConfig(blocking=False)
            )
            self._wait_ready(f"rank {rank} of {world_size} waits for its peers")
        except CommunicatorError:
            raise
        except Exception as error:  # nccl4py raises many kinds; the caller needs one
            self.close()
            raise CommunicatorError(f"NCCL initialisation failed on rank {rank}: {error}") from error

    def _state(self) -> int:
        return int(self._comm.get_async_error())

    def _wait_ready(self, what: str) -> None:
        """Wait until the communicator leaves 'in progress' (7). Raises CommunicatorError at the deadline."""
        deadline = time.monotonic() + self.timeout_s
        while (state := self._state()) == 7:
            if time.monotonic() > deadline:
                self.close()
                raise CommunicatorError(f"{what}: no progress in {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        if state != 0:
            self.close()
            raise CommunicatorError(f"{what}: NCCL error {state}")

    def broadcast(self, buffer: torch.Tensor) -> None:
        if self._comm is None:
            raise CommunicatorError("communicator is closed")
        staged = buffer if buffer.device == self.device else buffer.to(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        done = torch.cuda.Event()
        try:
            self._comm.broadcast(staged, staged, 0, stream=self._stream.cuda_stream)
        except Exception as error:  # as above
            self.close()
            raise CommunicatorError(f"broadcast failed on rank {self.rank}: {error}") from error
        self._wait_ready("broadcast")
        done.record(self._stream)
        deadline = time.monotonic() + self.timeout_s
        while not done.query():
            state = self._state()
            if state not in (0, 7) or time.monotonic() > deadline:
                self.close()
                raise CommunicatorError(f"broadcast on rank {self.rank}: error {state} or no progress")
            time.sleep(_POLL_S)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        if staged is not buffer and self.rank != 0:
            buffer.copy_(staged)

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()
