"""Weight transports by name; the communicators themselves are in `headrace.comm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.plugins.registry import Registry


@dataclass(frozen=True)
class Transport:
    """How weights travel. No torch is needed to make one."""

    communicator: Callable[..., Any] | str
    """A `Communicator`, or its `module:attribute`. Called with the keywords `store` (torch's, with keys of the
    group epoch alone), `rank`, `world_size`, `timeout_s`, `store_host` (where the other ranks can be reached)
    and `device` (where the buffers lie); meets the others within `timeout_s`. Raises CommunicatorError."""
    memory: Literal["cpu", "cuda"] = "cpu"
    """Where an engine's buffers lie. `cuda`: every rank has a GPU of its own, the trainer's too."""
    version: Callable[[], str] | str | None = None
    """Or `module:attribute`: the version that all members must share. Raises CommunicatorError."""


TRANSPORTS: Registry[Transport] = Registry(
    "transport",
    {
        "gloo": Transport("headrace.comm.gloo:GlooCommunicator"),
        "nccl": Transport(
            "headrace.comm.nccl:NcclCommunicator",
            memory="cuda",
            version="headrace.comm.nccl:loaded_version",
        ),
    },
    group="headrace.transports",
)
