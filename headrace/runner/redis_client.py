"""The runner's Redis client: a deadline on every call, no retries (those are the ledger client's)."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def connect(url: str, timeout_s: float) -> redis.Redis:
    """A client of `url`, bytes in and out. Nothing is sent yet. Raises ValueError on a URL that is none."""
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
