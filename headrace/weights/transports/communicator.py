"""The interface of every transport, and its error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class CommunicatorError(RuntimeError):
    """A peer is gone or too slow, or the transport failed."""


class Communicator(Protocol):
    rank: int
    world_size: int

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Copy rank 0's bytes into every rank's `buffer` (1-d uint8 on the communicator's device)."""

    def close(self) -> None:
        """Release everything and abort operations in progress. Never blocks, may be called twice."""
