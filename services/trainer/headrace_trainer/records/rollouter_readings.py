"""The rollouters' own readings in Redis: what share of the time they were idle, and how busy they were."""

from __future__ import annotations

import redis

from headrace.ledger.client import SyncLedger
from headrace.service import telemetry


class RollouterReadings:
    """Ratios between the last two readings. After a failed reading the ratios stay as they were."""

    def __init__(self, ledger: SyncLedger, run: str) -> None:
        self._ledger = ledger
        self._key = telemetry.telemetry_key(run)
        self.newest: dict[str, telemetry.RolloutTelemetry] | None = None
        """By incarnation; None before the first reading."""
        self.idle_ratio: float | None = None
        self.utilization: float | None = None

    def read(self) -> None:
        """Take a reading. The first one after a start gives no ratios: what the rollouters did before does
        not belong to this start's windows."""
        try:
            fresh = telemetry.decode_all(self._ledger.redis.hgetall(self._key))  # type: ignore[arg-type]
        except redis.RedisError:
            return  # nothing depends on it
        if self.newest is not None:
            idle = telemetry.idle_ratio(self.newest, fresh)
            self.idle_ratio = idle if idle is not None else self.idle_ratio
            busy = telemetry.utilization(self.newest, fresh)
            self.utilization = busy if busy is not None else self.utilization
        self.newest = fresh
