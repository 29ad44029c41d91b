"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.02


def until(condition: Callable[[], T], what: str, timeout_s: float = 90.0) -> T:
    """Poll until `condition` is true and return its value; the failure names what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(_POLL_S)
    return value
