"""What rollouters tell about themselves beside the ledger: counters for idle ratios, newest value only.

Nothing depends on it; it may be lost without harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RolloutTelemetry:
    """Cumulative since the incarnation started."""

    active_s: float
    """Seconds in which the engine had a running request."""
    window_s: float
    """Seconds in which it could have had one."""
    running: int
    target: int
    tokens: int
    samples: int
    version: int
    sequence_s: float = 0.0
    """Running sequences times seconds."""


def telemetry_key(run: str) -> str:
    return f"headrace:{{{run}}}:telemetry"


def encode(t: RolloutTelemetry) -> str:
    return json.dumps(asdict(t))


def decode_all(raw: Mapping[bytes, bytes]) -> dict[str, RolloutTelemetry]:
    out: dict[str, RolloutTelemetry] = {}
    for name, value in raw.items():
        fields: dict[str, Any] = json.loads(value)
        out[name.decode()] = RolloutTelemetry(**fields)
    return out


def idle_ratio(before: Mapping[str, RolloutTelemetry], after: Mapping[str, RolloutTelemetry]) -> float | None:
    """Share of the time between two readings in which engines had nothing running; None without time."""
    active = window = 0.0
    for name, now in after.items():
        then = before.get(name)
        active += now.active_s - (then.active_s if then else 0.0)
        window += now.window_s - (then.window_s if then else 0.0)
    return min(1.0, max(0.0, 1.0 - active / window)) if window > 0 else None


def utilization(
    before: Mapping[str, RolloutTelemetry], after: Mapping[str, RolloutTelemetry]
) -> float | None:
    """Running sequences over those of full slots, between two readings; None without time."""
    ran = could = 0.0
    for name, now in after.items():
        then = before.get(name)
        ran += now.sequence_s - (then.sequence_s if then else 0.0)
        could += now.target * (now.window_s - (then.window_s if then else 0.0))
    return min(1.0, max(0.0, ran / could)) if could > 0 else None
