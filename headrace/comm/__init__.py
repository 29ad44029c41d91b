"""The weight group's communicator: one narrow interface, Gloo and NCCL behind it.

A communicator belongs to one group epoch. It never touches torch's default process group. Every
call ends within the timeout given at construction or raises; after an error it is only good for
`close`.
"""

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


def nccl_version(transport: str) -> str:
    """The version of the NCCL that a communicator of this transport loads here; "" when it loads none.

    Members of a group must have the same: NCCL refuses others, and says so in its own log alone. Raises
    CommunicatorError when it cannot be loaded.
    """
    if transport != "nccl":
        return ""
    from headrace.comm.nccl import loaded_version

    return loaded_version()


def connect(
    transport: str,
    host: str,
    port: int,
    epoch: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    device: torch.device,
) -> Communicator:
    """Meet the other ranks of `epoch` at the store on host:port. Raises CommunicatorError."""
    from headrace.comm.store import client_store

    store = client_store(host, port, epoch, timeout_s)
    if transport == "gloo":
        from headrace.comm.gloo import GlooCommunicator

        return GlooCommunicator(store, rank, world_size, timeout_s, host, device)
    if transport == "nccl":
        from headrace.comm.nccl import NcclCommunicator

        return NcclCommunicator(store, rank, world_size, timeout_s, device)
    raise CommunicatorError(f"unknown transport {transport!r}; known: gloo, nccl")
