"""Redis clients as Headrace uses them: a deadline on every call, bytes in and out.

The ledger's clients retry whole operations under one request id. Retries in redis-py would only blur the
deadline, so they are turned off. Nothing is sent before the first call.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace.connections import tls

CALL_S = 5.0
"""Deadline of one call. If Redis stops answering, an update waits for two deadlines in sequence: first for
rank 0, which claims, then for all ranks, which read."""

AT_ONCE = 8
"""Maximum connections of one asyncio client. The server runs one command at a time, so more gain nothing.
redis-py never shrinks its pool: without a limit it would keep one for every sample and every held-out row
that waited for the same canary. A command waits for a connection as long as it would for an answer."""

VOLATILE = (
    "appendonly is no, so a restart of the server would lose the ledger and end the run; set it to yes on "
    "the server (with appendfsync always nothing acknowledged is ever lost), or accept that with "
    "redis.allow_volatile=true"
)

LOGIN_REFUSED = (
    redis.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.NoPermissionError,
)
"""Not outages, although redis-py derives two of them from ConnectionError. Retrying does not help."""


def login_refused(where: str, error: Exception) -> str:
    """Return the message for one of LOGIN_REFUSED from the server at `where`. It contains no password."""
    if isinstance(error, redis.exceptions.NoPermissionError):
        return (
            f"Redis at {where} does not permit this user what a run needs: {str(error).rstrip('.')}. Allow "
            "it the keys headrace:* and the commands on them, scripts included: ~headrace:* +@all -@dangerous"
        )
    return (
        f"Redis at {where} refuses the login: {str(error).rstrip('.')}. Give the password that it has now in "
        "HEADRACE_REDIS_PASSWORD, or in HEADRACE_REDIS_URL, and start again. In a cluster it comes from the "
        "run's Secret, key redis-password, which a container reads whenever it starts; docs/kubernetes.md, "
        "Credentials, has the steps of a change."
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


class _UpFirst(redis.asyncio.ConnectionPool):
    """A pool that prefers connected connections.

    redis-py takes the most recently released one. When no new connection can be made, for instance because
    the server's Service was deleted, it would pick the same failed one every time although others are up.
    """

    def get_available_connection(self) -> Any:
        self._available_connections.sort(key=lambda connection: connection.is_connected)  # taken from the end
        return super().get_available_connection()  # type: ignore[no-untyped-call]


class _Cancellable(redis.asyncio.connection.AbstractConnection):
    """A connection on which cancelling a command always takes effect.

    redis-py writes under asyncio.wait_for. Before Python 3.12 that loses a cancellation, or a deadline, that
    arrives after the write is done and before the waiting task is scheduled.
    """

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(*args, **kwargs)
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # its reply will not be read
            raise asyncio.CancelledError


class _TcpConnection(_Cancellable, redis.asyncio.Connection):
    pass


class _TlsConnection(_Cancellable, redis.asyncio.SSLConnection):
    pass


class _UnixConnection(_Cancellable, redis.asyncio.UnixDomainSocketConnection):
    """A Unix socket connection that logs in once, after it is connected.

    redis-py's own also logs in while it connects, and would report a refused password, or a server that is
    still loading, as a lost connection.
    """

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._reader, self._writer = await asyncio.open_unix_connection(path=self.path)


_OURS = {
    redis.asyncio.Connection: _TcpConnection,
    redis.asyncio.SSLConnection: _TlsConnection,
    redis.asyncio.UnixDomainSocketConnection: _UnixConnection,
}


class _Pool(redis.asyncio.BlockingConnectionPool, _UpFirst):
    """At most AT_ONCE connections. A command waits for a free one, but no longer than its deadline."""


def is_silence(error: Exception) -> bool:
    """Whether an established connection did not answer in time.

    It may be half-open, and then the idle connections of its pool may be too. A connection that could not be
    established says nothing about the others.
    """
    return isinstance(error, redis.TimeoutError) and "reading" in str(error)


def connect_async(url: str, timeout_s: float = CALL_S) -> redis.asyncio.Redis:
    """Return an asyncio client. A command that waits `timeout_s` for a connection raises ConnectionError."""
    pool = _Pool.from_url(
        url,
        max_connections=AT_ONCE,
        timeout=timeout_s,
        retry=AsyncRetry(NoBackoff(), 0),
        **_options(url, timeout_s),
    )
    pool.connection_class = _OURS[pool.connection_class]  # from_url prefers the URL's to an argument
    return redis.asyncio.Redis.from_pool(pool)


def connect(url: str, timeout_s: float = CALL_S) -> redis.Redis:
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_options(url, timeout_s))
