"""Redis clients as Headrace uses them: a deadline on every call, bytes in and out.

The ledger's clients repeat whole operations under one request id; retries below them would only blur
the deadline, so there are none. Nothing is sent before the first call.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace import tls

VOLATILE = (
    "appendonly is no, so a restart of the server would lose the ledger and end the run; set it to yes on "
    "the server (with appendfsync always nothing acknowledged is ever lost), or accept that with "
    "redis.allow_volatile=true"
)


def _options(url: str, timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 30,
        "decode_responses": False,
        "protocol": 2,
        **tls.redis_options(url),
    }


def connect_async(url: str, timeout_s: float = 10.0) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_url(url, retry=AsyncRetry(NoBackoff(), 0), **_options(url, timeout_s))


def connect(url: str, timeout_s: float = 10.0) -> redis.Redis:
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_options(url, timeout_s))
