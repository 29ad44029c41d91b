"""Watches the configuration file: a ConfigMap that is mounted changes in place, `headrace tune` replaces it.

eta and S are passed on; a file that changes anything else, or cannot be read, is refused as a whole and the
run goes on with what it has.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from headrace import tuning
from headrace.config import RunConfig
from headrace.config_load import ConfigError, load
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.driver import Driver
from headrace_coordinator.notices import ConfigRefused, Tuned

log = logging.getLogger("headrace.coordinator.tuning")

_LOOK_S = 1.0


class ConfigWatch:
    def __init__(self, path: Path, config: RunConfig, driver: Driver) -> None:
        """`config`: what was read from `path` at the start of this process."""
        self._path = path
        self._config = config
        self._driver = driver
        self._seen = _stamp(path)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Once: whether the file has changed, and what follows."""
        stamp = _stamp(self._path)
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
        if what := tuning.changed(self._config, fresh):
            log.info("configuration changed", extra={"what": what})
            self._config = fresh
            rule = fresh.rule
            self._driver.tune(pb.Tuning(sync_steps=rule.sync_steps, staleness_threshold=rule.threshold))
            self._driver.notices.tell(Tuned("; ".join(what) + ", with the next syncs"))

    def _refuse(self, lines: list[str]) -> None:
        log.error("the changed configuration is refused", extra={"reasons": lines})
        self._driver.notices.tell(ConfigRefused("; ".join(lines)))


def _stamp(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file is replaced or written; follows the links of a ConfigMap."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
