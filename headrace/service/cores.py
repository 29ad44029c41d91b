"""Bind a service of a local run to CPU cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

from headrace.config.loading import ConfigError


def problem(cpus: Sequence[int] | None) -> str | None:
    """Why processes cannot be bound to `cpus`, and what to do about it; None if there is no problem."""
    if cpus is None:
        return None
    if not hasattr(os, "sched_setaffinity"):
        return "this system cannot bind processes to cores; unset it"
    available = os.sched_getaffinity(0)
    missing = sorted(set(cpus) - available)
    return f"there is no core {missing} here; choose from {sorted(available)}" if missing else None


def bind(cpus: Sequence[int] | None, key: str) -> None:
    """Bind this process, and those that it starts from now on, to `cpus`. Raises ConfigError.

    `key`: the configuration key that names the cores. `cpus` None binds nothing.
    """
    if (why := problem(cpus)) is not None:
        raise ConfigError([f"{key}: {why}"])
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
