"""Watches the configuration file: a mounted ConfigMap changes in place, and `headrace tune` replaces it.

Tunable changes are passed on. A file that changes anything else, or cannot be read, is refused as a whole,
and the run keeps its configuration. A start takes the file as it is, and refuses what every service refuses
then: one that cannot be read, belongs to another run, or lets in more than Redis holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import redis
import redis.asyncio

from headrace.config import tuning
from headrace.config.loading import ConfigError, load
from headrace.config.redis_memory import needed_bytes
from headrace.config.run import RunConfig
from headrace.connections.redis_settings import memory_limit, server_settings
from headrace.ledger.client import LedgerUnavailable
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.rounds.driver import Driver
from headrace_coordinator.rounds.notices import ConfigRefused, Tuned

log = logging.getLogger("headrace.coordinator.tuning")

_LOOK_S = 1.0
_MEMORY_S = 30.0
"""Seconds between retries of a file that asks for too much memory: the server may be given more."""

Stamp = tuple[int, int, int] | None
"""A file's inode, modification time and size, or None if it does not exist."""
Follower = Callable[[RunConfig], None]


class ConfigWatch:
    def __init__(
        self,
        path: Path,
        config: RunConfig,
        seen: Stamp,
        driver: Driver,
        client: redis.asyncio.Redis,
        followers: Sequence[Follower] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch `path`.

        `config`: the configuration in use. `seen`: the stamp of `path` from before that was read, so that a
        change during a long start is noticed too. `client`: of the ledger's server. `followers` are given
        each accepted configuration.
        """
        self._path = path
        self._config = config
        self._driver = driver
        self._client = client
        self._seen = seen
        self._followers = followers
        self._clock = clock
        self._again_at: float | None = None
        """When to check the file again although it has not changed."""
        self._refused = False
        self._waits_for_redis = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Check the file once, and apply or refuse what has changed."""
        stamp = stamp_of(self._path)
        if stamp is None:
            return
        fresh = stamp != self._seen
        if not fresh and (self._again_at is None or self._clock() < self._again_at):
            return
        try:
            found = load(self._path)
            lines = tuning.refused(self._config, found)
        except ConfigError as error:
            found, lines = self._config, error.lines
        again_at = None
        if not lines:
            try:
                if why := await self._outgrown(found):
                    lines, again_at = [why], self._clock() + _MEMORY_S
            except redis.RedisError as error:
                if not self._waits_for_redis:
                    log.warning("a changed configuration waits for Redis", extra={"error": str(error)})
                self._waits_for_redis = True
                return  # undecided: the file still counts as new at the next look
        self._seen, self._again_at, self._waits_for_redis = stamp, again_at, False
        if lines:
            self._refuse(lines, fresh)
        else:
            self._accept(found)

    async def _outgrown(self, fresh: RunConfig) -> str | None:
        """Why the server's actual memory is not enough, or None.

        A configuration that needs no more than the current one always passes. Raises RedisError.
        """
        if needed_bytes(fresh) <= needed_bytes(self._config):
            return None
        return tuning.too_large(fresh, memory_limit(await server_settings(self._client, quiet=True)))

    def _refuse(self, lines: Sequence[str], fresh: bool) -> None:
        if self._refused and not fresh:
            return
        self._refused = True
        log.error("the changed configuration is refused", extra={"reasons": list(lines)})
        self._driver.notices.tell(ConfigRefused("; ".join(lines)))

    def _accept(self, fresh: RunConfig) -> None:
        what = tuning.changed(self._config, fresh)
        if what:
            log.info("configuration changed", extra={"what": what})
            before, self._config = self._config, fresh
            for follow in self._followers:
                follow(fresh)
            note = "; ".join(what)
            if before.rule != fresh.rule:
                rule = fresh.rule
                self._driver.tune(pb.Tuning(sync_steps=rule.sync_steps, staleness_threshold=rule.threshold))
                note += ", with the next syncs"
            self._driver.notices.tell(Tuned(note))
        elif self._refused:
            log.info("the configuration is what the run goes by again")
        self._refused = False


async def check_memory(config: RunConfig, client: redis.asyncio.Redis) -> None:
    """Check the memory at start-up, as the queue service does. Raises ConfigError and LedgerUnavailable."""
    try:
        limit = memory_limit(await server_settings(client, quiet=True))
    except redis.RedisError as error:
        raise LedgerUnavailable(f"Redis does not tell its memory: {error}") from None
    if why := tuning.too_large(config, limit):
        raise ConfigError([why])


def stamp_of(path: Path) -> Stamp:
    """A stamp that changes whenever the file is replaced or written. Follows a ConfigMap's links."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
