"""Redis clients as Headrace uses them: a deadline on every call, bytes in and out.

The ledger's clients repeat whole operations under one request id; retries below them would only blur
the deadline, so there are none. Nothing is sent before the first call.
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
"""Deadline of one call. On a line that has fallen silent an update waits for two, one after the other: for
that of rank 0, which claims, and for those of the ranks, which read."""

AT_ONCE = 8
"""Connections of one asyncio client. The server runs one command at a time, so more of them gain nothing, and
redis-py keeps as many as were ever in use at once: without a limit, one for every sample and every held-out
row that waited for the same canary. A command waits for a connection as long as it would for an answer."""

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
"""No outage, although redis-py takes two of them for lost connections: asking again changes nothing."""


def login_refused(where: str, error: Exception) -> str:
    """What to tell whoever gets one of LOGIN_REFUSED from the server at `where`. It names no password."""
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
    """Connections that are up go first.

    redis-py's takes the one that was given back last. Where no new connection can be made, since the server's
    Service is deleted say, that is one which failed, again and again, above others that are up.
    """

    def get_available_connection(self) -> Any:
        self._available_connections.sort(key=lambda connection: connection.is_connected)  # taken from the end
        return super().get_available_connection()  # type: ignore[no-untyped-call]


class _Cancellable(redis.asyncio.connection.AbstractConnection):
    """What is cancelled ends. redis-py writes under asyncio.wait_for, and before Python 3.12 that forgets a
    cancellation, or a deadline, that comes between the end of the write and its own turn."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(*args, **kwargs)
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # nobody reads the answer
            raise asyncio.CancelledError


class _TcpConnection(_Cancellable, redis.asyncio.Connection):
    pass


class _TlsConnection(_Cancellable, redis.asyncio.SSLConnection):
    pass


class _UnixConnection(_Cancellable, redis.asyncio.UnixDomainSocketConnection):
    """redis-py's logs in while it connects, and once more afterwards: a refused password, or a server that
    still loads, would be told as a lost connection."""

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._reader, self._writer = await asyncio.open_unix_connection(path=self.path)


_OURS = {
    redis.asyncio.Connection: _TcpConnection,
    redis.asyncio.SSLConnection: _TlsConnection,
    redis.asyncio.UnixDomainSocketConnection: _UnixConnection,
}


class _Pool(redis.asyncio.BlockingConnectionPool, _UpFirst):
    """At most AT_ONCE connections; a command waits for one of them, and for no longer than its deadline."""


def is_silence(error: Exception) -> bool:
    """Whether a connection that was up gave no answer in time. Its line may be half-open, and then so are
    those of its pool that wait for work. One that could not be made says nothing about others."""
    return isinstance(error, redis.TimeoutError) and "reading" in str(error)


def connect_async(url: str, timeout_s: float = CALL_S) -> redis.asyncio.Redis:
    """Raises redis.ConnectionError for a command that waited `timeout_s` for one of AT_ONCE connections."""
    pool = _Pool.from_url(
        url,
        max_connections=AT_ONCE,
        timeout=timeout_s,
        retry=AsyncRetry(NoBackoff(), 0),
        **_options(url, timeout_s),
    )
    pool.connection_class = _OURS[pool.connection_class]  # an argument would lose against the URL
    return redis.asyncio.Redis.from_pool(pool)


def connect(url: str, timeout_s: float = CALL_S) -> redis.Redis:
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_options(url, timeout_s))
