"""Acts once on the run's completion: scales both Deployments to zero, if configured, and writes an Event.

A completion belongs to one lineage: a trainer that reopens the run completes it again. Each finished step is
recorded in Redis next to the ledger. A Deployment that somebody scales up afterwards therefore stays up, even
if the coordinator restarts. A failed step is retried.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import redis

from headrace.config.kubernetes import KubernetesConfig
from headrace.ledger import keys, ops
from headrace.ledger.client import LedgerError
from headrace_coordinator.kube.api import Cluster
from headrace_coordinator.rounds.driver import Driver

log = logging.getLogger("headrace.coordinator.kube")

_TELL_S = 600.0
"""Seconds after which writing the Event is given up."""


def done_key(run: str) -> str:
    """Redis hash: for each step, the last lineage for which it was done."""
    return keys.prefix(run) + "completion"


class Completion:
    def __init__(
        self,
        run: str,
        driver: Driver,
        cluster: Cluster,
        attempt: Callable[..., Awaitable[bool]],
        reporter: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`attempt` makes one API call and returns whether it succeeded."""
        self._key = done_key(run)
        self._driver = driver
        self._cluster = cluster
        self._attempt = attempt
        self._reporter = reporter
        self._clock = clock
        self._event: tuple[int, str, float] = (-1, "", 0.0)
        """(lineage, name of its Event, time at which writing it is given up)."""

    async def look(self, settings: KubernetesConfig) -> bool:
        """Check once. Returns False when something is left to do."""
        try:
            lineage = await self._completed()
            if lineage is None:
                return True
            done = await self._driver.ledger.redis.hgetall(self._key)
            left = [step for step in self._steps(settings) if int(done.get(step.encode(), -1)) < lineage]
            worked: list[bool] = []
            for step in left:
                worked.append(await self._take(step, lineage, settings, all(worked)))
        except (LedgerError, redis.RedisError) as error:
            log.warning("the end of the run waits for the ledger", extra={"error": str(error)})
            return False
        return all(worked)

    @staticmethod
    def _steps(settings: KubernetesConfig) -> list[str]:
        names = (settings.rollouter_deployment, settings.trainer_deployment)
        scaled = [f"scale:{name}" for name in names] if settings.scale_to_zero_on_completion else []
        return [*scaled, "event"]

    async def _completed(self) -> int | None:
        """The lineage that has completed the run. None if none has, or if a newer coordinator exists."""
        stats = await self._driver.ledger.run(ops.stats())
        return stats.lineage if stats.completed and stats.term == self._driver.term else None

    async def _take(self, step: str, lineage: int, settings: KubernetesConfig, scaled: bool) -> bool:
        if await self._completed() != lineage:  # opened again, perhaps a moment ago
            return True
        kind, _, name = step.partition(":")
        if kind == "scale":
            worked = await self._attempt(self._cluster.scale, name, 0)
        else:
            worked = await self._tell(lineage, settings, scaled)
        if worked:
            await self._driver.ledger.redis.hset(self._key, step, lineage)
        return worked

    async def _tell(self, lineage: int, settings: KubernetesConfig, scaled: bool) -> bool:
        """Write the Event. Returns True when it is written or has been given up."""
        about = settings.trainer_deployment
        if self._event[0] != lineage:
            self._event = lineage, f"{about[:200]}.{uuid.uuid4().hex[:16]}", self._clock() + _TELL_S
            log.info("run completed", extra={"version": self._driver.state.version, "lineage": lineage})
        _, name, until = self._event
        note = f"version {self._driver.state.version} is exported"
        if settings.scale_to_zero_on_completion:
            note += f"; rollouters and trainer {'are' if scaled else 'could not yet be'} scaled to none"
        what = (name, "Deployment", about, "RunCompleted", note, False, self._reporter, datetime.now(UTC))
        if await self._attempt(self._cluster.create_event, *what):
            return True
        if self._clock() < until:
            return False
        log.error("the Event of the run's completion is given up", extra={"tried_s": _TELL_S})
        return True
