"""The settings that a Redis server reports about itself."""

from __future__ import annotations

import logging
from typing import Any, cast

import redis
import redis.asyncio

log = logging.getLogger(__name__)

_NAMES = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync")
_IN_INFO = {"maxmemory-policy": "maxmemory_policy", "maxmemory": "maxmemory"}


async def server_settings(client: redis.asyncio.Redis, *, quiet: bool = False) -> dict[str, str]:
    """Return the relevant settings, without those that the server does not report.

    `quiet`: do not log a warning about missing ones, for callers that poll. Raises RedisError.
    """
    try:
        found = await cast(Any, client).config_get(*_NAMES)
        return {_text(name): _text(value) for name, value in found.items()}
    except redis.ResponseError as error:  # managed servers forbid CONFIG; INFO has some of the settings
        level = logging.DEBUG if quiet else logging.WARNING
        log.log(level, "Redis does not permit CONFIG GET", extra={"error": str(error)})
    try:
        info = await cast(Any, client).info("memory")
    except redis.ResponseError:
        return {}
    return {name: str(info[field]) for name, field in _IN_INFO.items() if field in info}


def memory_limit(settings: dict[str, str]) -> int:
    """Return `maxmemory` in bytes; 0 for no limit, or if the server does not report it."""
    limit = settings.get("maxmemory", "0")
    return int(limit) if limit.isdigit() else 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
