"""Recommends a number of rollouters after every sync, as a metric and for `headrace status`.

Nothing depends on it: what cannot be read or written is left out until the next sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import redis

from headrace.config.run import RunConfig
from headrace.ledger.client import AsyncLedger
from headrace.metrics import coordinator as metrics
from headrace.service import recommendation, telemetry
from headrace.service.recommendation import Advice, WindowReading
from headrace.service.telemetry import RolloutTelemetry
from headrace_coordinator.rounds.notices import Committed, Notice

log = logging.getLogger("headrace.coordinator.advice")


class Adviser:
    def __init__(self, config: RunConfig, ledger: AsyncLedger, notices: asyncio.Queue[Notice]) -> None:
        self.advice: Advice | None = None
        self._config = config
        self._ledger = ledger
        self._notices = notices
        self._seen: Mapping[str, RolloutTelemetry] = {}

    def follow(self, config: RunConfig) -> None:
        """Adopt a changed configuration from the next sync on."""
        self._config = config

    async def run(self) -> None:
        await self._begin()
        while True:
            notice = await self._notices.get()
            if isinstance(notice, Committed):
                try:
                    await self._after(notice)
                except (redis.RedisError, ValueError, TypeError) as error:
                    log.warning("no advice after this sync", extra={"error": str(error)})

    async def _begin(self) -> None:
        """Start from the last recommendation, or the run's initial number: an autoscaler may act at once."""
        run, advised = self._config.name, self._config.rollout.replicas
        try:
            kept = recommendation.decode(await self._ledger.redis.get(recommendation.recommendation_key(run)))
            advised = int(kept["rollouters"]) if kept else advised
        except (redis.RedisError, ValueError, TypeError) as error:
            log.warning("the last advice cannot be read", extra={"error": str(error)})
        metrics.RECOMMENDED_ROLLOUTERS.set(advised)
        self.advice = Advice(advised, "nothing seen yet", ())

    async def _after(self, sync: Committed) -> None:
        run, client = self._config.name, self._ledger.redis
        raw = await client.hgetall(telemetry.telemetry_key(run))
        fresh = telemetry.decode_all(raw)  # type: ignore[arg-type]
        idle = telemetry.idle_ratio(self._seen, fresh)
        self._seen = fresh
        if sync.begin.step_s <= 0:  # the first sync of a trainer: nothing was trained since
            return
        reading = WindowReading(min(1.0, sync.begin.wait_s / sync.begin.step_s), idle or 0.0, sync.members)
        before = self.advice
        self.advice = recommendation.advise(
            self._config.kubernetes.recommendation, before, reading, time.monotonic()
        )
        metrics.RECOMMENDED_ROLLOUTERS.set(self.advice.rollouters)
        if before is None or before.rollouters != self.advice.rollouters:
            log.info("advice", extra={"rollouters": self.advice.rollouters, "why": self.advice.why})
        await client.set(recommendation.recommendation_key(run), recommendation.encode(self.advice))
