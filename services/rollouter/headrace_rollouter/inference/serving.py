"""The engine's serving state, shared by everything that uses the engine."""

from __future__ import annotations

import asyncio
import time


class Serving:
    """Written by the coordinator's stream and the drain, read by the workers."""

    def __init__(self) -> None:
        self.version = -1
        """The policy version being served, or the last one served while a sync pauses the engine."""
        self.running = asyncio.Event()
        """The engine runs under a committed version."""
        self.trusted = asyncio.Event()
        """The canary of the current version has passed, so results may leave."""
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
        """Whether the rollouter has stopped taking and starting work."""
        return self.drain_began.is_set()

    def clock(self) -> float:
        """Monotonic seconds that stand still while a sync pauses the engine."""
        now = self._paused_at if self._paused_at is not None else time.monotonic()
        return now - self._paused_s
