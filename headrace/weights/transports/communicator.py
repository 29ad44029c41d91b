"""What every transport provides, and the error that it raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class CommunicatorError(RuntimeError):
    """A peer is gone, too slow, or the transport failed."""


class Communicator(Protocol):
    rank: int
    world_size: int

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Rank 0's bytes into everybody's `buffer` (1-d uint8 on the communicator's device)."""

    def close(self) -> None:
        """Give everything back, aborting what is under way. Never blocks, may be called twice."""
