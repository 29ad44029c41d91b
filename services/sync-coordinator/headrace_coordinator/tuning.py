"""Watches the configuration file: a ConfigMap that is mounted changes in place, `headrace tune` replaces it.

eta and S are passed on; a file that changes anything else, or cannot be read, is refused as a whole and the
run goes on with what it has.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import redis
import redis.asyncio

from headrace import tuning
from headrace.config import RunConfig
from headrace.config_load import ConfigError, load
from headrace.memory import needed_bytes, too_small
from headrace.redis_settings import memory_limit, server_settings
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.driver import Driver
from headrace_coordinator.notices import ConfigRefused, Tuned

log = logging.getLogger("headrace.coordinator.tuning")

_LOOK_S = 1.0

Stamp = tuple[int, int] | None
"""Of a file: its inode and when it was written; None when it is not there."""


class ConfigWatch:
    def __init__(
        self, path: Path, config: RunConfig, seen: Stamp, driver: Driver, client: redis.asyncio.Redis
    ) -> None:
        """`config`: what was read from `path` at the start of this process; `seen`: its stamp from before
        that, so that what changes during a long start is noticed, too. `client`: of the ledger's server."""
        self._path = path
        self._config = config
        self._driver = driver
        self._client = client
        self._seen = seen

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Once: whether the file has changed, and what follows."""
        stamp = stamp_of(self._path)
        if stamp is None or stamp == self._seen:
            return
        self._seen = stamp
        try:
            fresh = load(self._path)
        except ConfigError as error:
            self._refuse(error.lines)
            return
        if lines := tuning.refused(self._config, fresh):
            self._refuse(lines)
            return
        try:
            why = await self._too_large(fresh)
        except redis.RedisError as error:
            log.warning("a changed configuration waits for Redis", extra={"error": str(error)})
            self._seen = None
            return
        if why is not None:
            self._refuse([why])
            return
        if what := tuning.changed(self._config, fresh):
            log.info("configuration changed", extra={"what": what})
            self._config = fresh
            rule = fresh.rule
            self._driver.tune(pb.Tuning(sync_steps=rule.sync_steps, staleness_threshold=rule.threshold))
            self._driver.notices.tell(Tuned("; ".join(what) + ", with the next syncs"))

    async def _too_large(self, fresh: RunConfig) -> str | None:
        """Why the server's real memory is not enough, with which the queue service would not start any more.
        What needs no more than the present is welcome in any case. Raises RedisError."""
        if needed_bytes(fresh) <= needed_bytes(self._config):
            return None
        limit = memory_limit(await server_settings(self._client))
        why = too_small(fresh, limit)
        return why and f"{' and '.join(tuning.TUNABLE)}: Redis has maxmemory {limit}: {why}"

    def _refuse(self, lines: list[str]) -> None:
        log.error("the changed configuration is refused", extra={"reasons": lines})
        self._driver.notices.tell(ConfigRefused("; ".join(lines)))


def stamp_of(path: Path) -> Stamp:
    """Changes whenever the file is replaced or written; follows the links of a ConfigMap."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
