"""What the engine serves at the moment: shared by everything that works on it."""

from __future__ import annotations

import asyncio
import time


class Serving:
    """Changed by the coordinator's stream and by the drain; read by the work."""

    def __init__(self) -> None:
        self.version = -1
        """The policy version that is served, or was served last while a sync pauses the engine."""
        self.running = asyncio.Event()
        """The engine runs under a committed version."""
        self.trusted = asyncio.Event()
        """The canary of the present version has passed: results may leave."""
        self.drain_began = asyncio.Event()
        self._paused_at: float | None = None
        self._paused_s = 0.0

    def paused(self) -> None:
        self.running.clear()
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resumed(self, version: int) -> None:
        self.version = version
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None
        self.trusted.clear()
        self.running.set()

    @property
    def draining(self) -> bool:
        """No work is taken or begun any more."""
        return self.drain_began.is_set()

    def clock(self) -> float:
        """Monotonic seconds that stand still while a sync pauses the engine."""
        now = self._paused_at if self._paused_at is not None else time.monotonic()
        return now - self._paused_s
