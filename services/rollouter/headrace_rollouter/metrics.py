"""Shows the rollouter's metrics, beside vLLM's own in the same default registry.

vLLM counts in this process, also where the engine's core and its workers are processes of their own.
"""

from __future__ import annotations

from headrace.metrics import rollouter as table

table.SERVICE.show()


class Usage:
    """Turns the engine's sums into counters, and into the idle ratio of each version that has ended."""

    def __init__(self) -> None:
        self._active_s = self._window_s = 0.0
        self._tokens = 0
        self._version = -1
        self._began = (0.0, 0.0)
        """(active, window) seconds at the start of the present version."""

    def seen(self, active_s: float, window_s: float, tokens: int, version: int) -> None:
        """Sums since the process started; what went backward is left out."""
        table.ACTIVE.inc(max(0.0, active_s - self._active_s))
        table.WINDOW.inc(max(0.0, window_s - self._window_s))
        table.TOKENS.inc(max(0, tokens - self._tokens))
        self._active_s, self._window_s, self._tokens = active_s, window_s, tokens
        if version != self._version:
            could = window_s - self._began[1]
            if could > 0 and self._version >= 0:  # before the first version there was nothing to run
                table.IDLE.set(min(1.0, max(0.0, 1.0 - (active_s - self._began[0]) / could)))
            self._version, self._began = version, (active_s, window_s)
