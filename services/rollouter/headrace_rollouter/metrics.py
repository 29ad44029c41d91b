"""Exposes the rollouter's metrics alongside vLLM's in the default registry.

vLLM counts in this process even when the engine core and its workers run in separate ones.
"""

from __future__ import annotations

from headrace.metrics import rollouter as table

table.SERVICE.show()


class Usage:
    """Turns the engine's running totals into counters, and into an idle ratio for each past version."""

    def __init__(self) -> None:
        self._active_s = self._window_s = 0.0
        self._tokens = 0
        self._version = -1
        self._began = (0.0, 0.0)
        """(active, window) seconds at the start of the current version."""

    def seen(self, active_s: float, window_s: float, tokens: int, version: int) -> None:
        """Take totals since the process started. A total that went backwards adds nothing."""
        table.ACTIVE.inc(max(0.0, active_s - self._active_s))
        table.WINDOW.inc(max(0.0, window_s - self._window_s))
        table.TOKENS.inc(max(0, tokens - self._tokens))
        self._active_s, self._window_s, self._tokens = active_s, window_s, tokens
        if version != self._version:
            could = window_s - self._began[1]
            if could > 0 and self._version >= 0:  # before the first version there was nothing to run
                table.IDLE.set(min(1.0, max(0.0, 1.0 - (active_s - self._began[0]) / could)))
            self._version, self._began = version, (active_s, window_s)
