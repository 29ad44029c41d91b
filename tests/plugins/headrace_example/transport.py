from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.weights.transports import CommunicatorError, Transport


class StoreCommunicator:
    """Weights by way of the store at which the group meets: slow, and works wherever the store does."""

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
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._number = 0

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._number += 1
        key, count, done = (f"{self._number}/{name}" for name in ("bytes", "count", "done"))
        try:
            if self.rank == 0:
                self._store.set(key, buffer.cpu().numpy().tobytes())  # type: ignore[arg-type] # takes bytes too
                if self.world_size > 1:
                    self._store.wait([done], self._timeout)
                self._store.delete_key(key)
            else:
                self._store.wait([key], self._timeout)
                received = bytearray(self._store.get(key))
                buffer.copy_(torch.frombuffer(received, dtype=torch.uint8))
                if self._store.add(count, 1) == self.world_size - 1:
                    self._store.set(done, "1")
        except RuntimeError as error:
            raise CommunicatorError(f"broadcast failed on rank {self.rank}: {error}") from error

    def close(self) -> None:
        """The store is the group's; there is nothing else."""


STORE = Transport(StoreCommunicator)
