"""Trackers by name. Each is a class that inherits from `headrace.records.trackers.Tracker`."""

from __future__ import annotations

from typing import Any

from headrace.plugins.registry import Registry

CONSOLE = "console"
"""The console output that the runner always shows. It is not a tracker."""

TRACKERS: Registry[Any] = Registry(
    "tracker",
    {
        "tensorboard": "headrace.records.trackers.tensorboard:TensorBoard",
        "wandb": "headrace.records.trackers.weights_and_biases:Wandb",
    },
    group="headrace.trackers",
)


def known_tracker(name: str) -> str:
    """Return `name`; a validator for configuration fields. Raises ValueError if it is unknown."""
    return name if name == CONSOLE else TRACKERS.checked(name)
