"""Trackers by name. Each is a class that inherits from `headrace.records.trackers.Tracker`."""

from __future__ import annotations

from typing import Any

from headrace.plugins.registry import Registry

CONSOLE = "console"
"""The console output that the runner always shows. It is not a tracker."""

_METHODS = ("problems", "warnings", "log", "flush", "close")


def _tracker(found: Any) -> Any:
    missing = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise TypeError(f"it has no {', '.join(missing)}; inherit from headrace.records.trackers.Tracker")
    return found


TRACKERS: Registry[Any] = Registry(
    "tracker",
    {
        "tensorboard": "headrace.records.trackers.tensorboard:TensorBoard",
        "wandb": "headrace.records.trackers.weights_and_biases:Wandb",
    },
    group="headrace.trackers",
    convert=_tracker,
)


def known_tracker(name: str) -> str:
    """Return `name`; a validator for configuration fields. Raises ValueError if it is unknown."""
    return name if name == CONSOLE else TRACKERS.checked(name)
