"""Weight transports by name; the communicators themselves are in `headrace.weights.transports`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.plugins.registry import Registry


@dataclass(frozen=True)
class Transport:
    """How weights travel. No torch is needed to make one."""

    communicator: Callable[..., Any] | str
    """A `Communicator`, or its `module:attribute`. It is called with keywords: `store` (torch's, with keys of
    the group epoch alone), `rank`, `world_size`, `timeout_s`, `store_host` (where the other ranks can be
    reached) and `device` (where the buffers lie). It meets the others within `timeout_s`, or raises
    CommunicatorError."""
    memory: Literal["cpu", "cuda"] = "cpu"
    """Where an engine's buffers lie. `cuda`: every rank has a GPU of its own, the trainer's too."""
    version: Callable[[], str] | str | None = None
    """Or `module:attribute`: the version that all members must share. Raises CommunicatorError."""


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
