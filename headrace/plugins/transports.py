"""Weight transports by name; the communicators themselves are in `headrace.weights.transports`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.plugins.registry import Registry


@dataclass(frozen=True)
class Transport:
    """How weights travel. Creating one does not need torch."""

    communicator: Callable[..., Any] | str
    """A `Communicator`, or its `module:attribute`. It is called with the keywords `store` (a torch Store with
    keys of this group epoch only), `rank`, `world_size`, `timeout_s`, `store_host` (where the other ranks can
    be reached) and `device` (of the buffers). It joins the other ranks within `timeout_s` or raises
    CommunicatorError."""
    memory: Literal["cpu", "cuda"] = "cpu"
    """Where an engine's buffers are. `cuda`: every rank, including the trainer's, has its own GPU."""
    version: Callable[[], str] | str | None = None
    """The version that all members must share, or its `module:attribute`. Raises CommunicatorError."""


TRANSPORTS: Registry[Transport] = Registry(
    "transport",
    {
        "gloo": Transport("headrace.weights.transports.gloo:GlooCommunicator"),
        "nccl": Transport(
            "headrace.weights.transports.nccl:NcclCommunicator",
            memory="cuda",
            version="headrace.weights.transports.nccl:loaded_version",
        ),
    },
    group="headrace.transports",
)
