"""A run whose services a cluster starts. It has no runner, lock or summary.

Its directory is the checkpoint volume. The pods' environment variables name its ledger. Without them (in a
copy of the directory elsewhere), only its files can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from headrace.config import loading, redis_url
from headrace.config.loading import ConfigError
from headrace.connections import variables
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.ledger.replies import Stats
from headrace.records.layout import RunLayout
from headrace.service import recommendation

COMPLETED, RUNNING, UNKNOWN = "completed", "running", "unknown"

NO_ADDRESS = (
    "no runner has been here: a run of a cluster, or a copy. Its ledger is read in one of its pods, or "
    "anywhere with HEADRACE_REDIS_URL as it is there, and HEADRACE_REDIS_PASSWORD from the release's Secret"
)


@dataclass(frozen=True)
class ClusterReading:
    """A reading of the ledger. `stats` is None if it cannot be read; `note` says why."""

    stats: Stats | None
    advice: Mapping[str, Any] | None = None
    note: str | None = None

    @property
    def state(self) -> str:
        """The run's state. The ledger does not know about pods, so an incomplete run counts as running."""
        if self.stats is None:
            return UNKNOWN
        return COMPLETED if self.stats.completed else RUNNING


def ledger_url() -> str | None:
    """URL, with password, of the server that the environment names; None if it names none.

    Raises LedgerError if it is not a valid URL.
    """
    try:
        url = variables.redis_url_if_set()
    except ConfigError as error:
        raise LedgerError(str(error)) from None
    if url is not None:
        try:
            redis_url.parse(url)
        except ValueError as error:
            raise LedgerError(f"HEADRACE_REDIS_URL: {error}") from None
    return url


def name_of(layout: RunLayout) -> str:
    """The run's name in the ledger. Raises ConfigError."""
    return loading.load(layout.config).name if layout.config.exists() else layout.root.name


def look(layout: RunLayout, timeout_s: float = 3.0) -> ClusterReading:
    """Read the ledger once. Does not raise if it cannot be read."""
    try:
        url, run = ledger_url(), name_of(layout)
        if url is None:
            return ClusterReading(None, note=NO_ADDRESS)
        with connect(url, timeout_s=timeout_s) as client:
            stats = SyncLedger(client, run, retry_s=1.0).run(ops.stats())
            return ClusterReading(
                stats, recommendation.decode(client.get(recommendation.recommendation_key(run)))
            )
    except (LedgerError, redis.RedisError, OSError, ConfigError, ValueError) as error:
        return ClusterReading(None, note=f"its ledger cannot be read: {error}")
