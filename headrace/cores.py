"""Binding a service of a local run to cores of the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from headrace.config_load import ConfigError


def bind(cpus: Sequence[int] | None, key: str) -> None:
    """This process, and what it starts from now on, runs on `cpus` only. Raises ConfigError.

    `key`: the configuration key that names them. None binds nothing.
    """
    if cpus is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError([f"{key}: this system cannot bind processes to cores; unset it"])
    available = os.sched_getaffinity(0)
    missing = sorted(set(cpus) - available)
    if missing or not cpus:
        raise ConfigError([f"{key}: {list(cpus)} is not possible; this machine has {sorted(available)}"])
    os.sched_setaffinity(0, cpus)
