"""Axes: their ranges, ticks and number formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps values `low`..`high` to pixels `start`..`stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self, wanted: int = 6) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((last - first) / wanted))
            return [10.0**k for k in range(first, last + 1, every)]
        step = nice_step((self.high - self.low) / wanted)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))


def limits(values: Sequence[float], percent: bool = False, log: bool = False) -> tuple[float, float]:
    """The range of an axis for `values`. It starts at 0 if they come near it, and is never empty."""
    if log:
        positive = [v for v in values if v > 0] or [1.0]
        return 10.0 ** math.floor(math.log10(min(positive))), 10.0 ** (
            math.floor(math.log10(max(positive))) + 1
        )
    low, high = min(values), max(values)
    if percent:
        return min(0.0, low), 1.0 if 0.5 < high <= 1.0 else high * 1.1 or 0.1
    if low >= 0 and low < 0.6 * high:
        low = 0.0
    if high == low:
        pad = abs(high) * 0.1 or 1.0
        return (low if low == 0 else low - pad), high + pad
    pad = (high - low) * 0.08
    return low if low == 0 else low - pad, high + pad


def without_outliers(values: Sequence[float]) -> float | None:
    """The end of an axis of positive values at which a few outliers do not flatten the rest, or None."""
    ordered = sorted(values)
    if len(ordered) < 20:
        return None
    usual = ordered[int(0.97 * (len(ordered) - 1))]
    return usual * 1.25 if usual > 0 and ordered[-1] > 3 * usual else None


def wall_unit(longest_s: float) -> tuple[float, str]:
    """Seconds per unit, and the unit's name."""
    if longest_s < 300:
        return 1.0, "s"
    return (60.0, "min") if longest_s < 3 * 3600 else (3600.0, "h")


def written(value: float, percent: bool = False) -> str:
    """Format a number for ticks and tables: short, without trailing zeros."""
    if percent:
        return f"{100 * value:.3g} %"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g} M"
    if size >= 1e4:
        return f"{value / 1e3:.4g} k"
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"
