"""Gloo communicator: CPU memory; a CUDA buffer is staged through the host."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.connections.net import interface_address
from headrace.weights.transports.communicator import CommunicatorError


class GlooCommunicator:
    """A private ProcessGroupGloo over the epoch's store."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        store_host: str,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        # Listen on the address that faces the store: a pod's hostname may resolve to anything.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface_address(store_host))]
        options._threads = 1
        try:
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
                store, rank, world_size, options
            )
        except RuntimeError as error:
            raise CommunicatorError(f"rank {rank} of {world_size} did not meet its peers: {error}") from error

    def broadcast(self, buffer: torch.Tensor) -> None:
        if self._group is None:
            raise CommunicatorError("communicator is closed")
        staged = buffer if buffer.device.type == "cpu" else buffer.cpu()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            self._group.broadcast([staged], options).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise CommunicatorError(f"broadcast failed on rank {self.rank}: {error}") from error
        if staged is not buffer and self.rank != 0:
            buffer.copy_(staged)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()
