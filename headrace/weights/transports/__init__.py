"""The weight group's communicator: one narrow interface, and the transports behind it by name.

A communicator belongs to one group epoch. It never touches torch's default process group. Every
call ends within the timeout given at construction or raises; after an error it is only good for
`close`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.plugins.registry import imported
from headrace.plugins.transports import TRANSPORTS, Transport
from headrace.weights.transports.communicator import Communicator, CommunicatorError

if TYPE_CHECKING:
    import torch

__all__ = ["Communicator", "CommunicatorError", "Transport", "connect", "library_version"]


def library_version(transport: str) -> str:
    """The version of the library that carries this transport's weights; "" where versions do not matter.

    Members of a group must have the same: NCCL refuses others, and says so in its own log alone. Raises
    CommunicatorError when it cannot be loaded, ValueError for an unknown transport.
    """
    version = TRANSPORTS.get(transport).version
    return str(imported(version)()) if version is not None else ""


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
    from headrace.weights.transports.store import client_store

    try:
        make: Any = imported(TRANSPORTS.get(transport).communicator)
    except ValueError as error:
        raise CommunicatorError(str(error)) from error
    store = client_store(host, port, epoch, timeout_s)
    found: Communicator = make(
        store=store, rank=rank, world_size=world_size, timeout_s=timeout_s, store_host=host, device=device
    )
    return found
