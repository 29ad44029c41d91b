"""A gauge that is not there before it has a value.

A ratio of 0 or 1 that nobody has measured is wrong, and NaN makes sums and means of it NaN.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, Gauge


class LateGauge(Gauge):
    """Without labels. It is in the registry from its first `set` on, which one thread calls."""

    def __init__(self, name: str, documentation: str) -> None:
        super().__init__(name, documentation, registry=None)
        self._is_shown = False

    def set(self, value: float) -> None:
        super().set(value)
        if not self._is_shown:
            self._is_shown = True
            REGISTRY.register(self)
