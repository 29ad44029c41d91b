"""Settings of the coordinator's streams that both ends share: keepalive, reconnection, logging of outages.

A connection whose packets vanish (a node that is gone, a proxy that lost its route) looks like an idle one.
Both ends therefore send pings, and close the connection when no answer comes. If the network works again by
then, the stream is back at most PING_EVERY_S + PONG_WITHIN_S + AGAIN_AT_MOST_S after the last packet, plus
the time to connect: under 15 s.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from headrace.connections.tls import Options

PING_EVERY_S = 5.0
PONG_WITHIN_S = 5.0
CONNECT_WITHIN_S = 3.0
"""Timeout of one connection attempt: the next one may find the network working again."""
AGAIN_FIRST_S = 0.2
AGAIN_AT_MOST_S = 2.0
SAID_EVERY_S = 60.0
"""Interval between log lines during an outage."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A manifest names every tensor of the model."""


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


_BOTH: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _ms(PING_EVERY_S)),
    ("grpc.keepalive_timeout_ms", _ms(PONG_WITHIN_S)),
    ("grpc.http2.ping_timeout_ms", _ms(PONG_WITHIN_S)),  # default: a minute, whatever the line above says
    # By default gRPC pings twice while no data flows, and then only once a minute.
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT: Options = (
    *_BOTH,
    ("grpc.min_reconnect_backoff_ms", _ms(CONNECT_WITHIN_S)),  # also the limit of one attempt
    ("grpc.initial_reconnect_backoff_ms", _ms(AGAIN_FIRST_S)),
    ("grpc.max_reconnect_backoff_ms", _ms(AGAIN_AT_MOST_S)),
)
SERVER: Options = (
    *_BOTH,
    # A server that is pinged more often than this closes the connection (GOAWAY, too_many_pings).
    ("grpc.http2.min_ping_interval_without_data_ms", _ms(PING_EVERY_S / 4)),
    ("grpc.keepalive_permit_without_calls", 1),  # a ping may arrive just after a stream ends
    ("grpc.so_reuseport", 0),  # a second coordinator on the port is an error
)


class TokenRefused(RuntimeError):
    """The coordinator rejects this service's token.

    The token was read once, at startup, so retrying does not help: the service ends with EX_CONFIG (`endings`
    describes what a restart does).
    """

    def __init__(self, address: str) -> None:
        super().__init__(
            f"the coordinator at {address} refuses the token: give this service the HEADRACE_TOKEN that the "
            "coordinator has, and start it again. In a cluster both read it from the run's Secret, key "
            "token, when their containers start; docs/security.md, Credentials, says how it is replaced"
        )


class CoordinatorRefused(RuntimeError):
    """The coordinator rejects this service's configuration; retrying does not help."""


class Outage:
    """The up or down state of one stream across its connections. For one thread or one event loop."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._since: float | None = None
        self._said = 0.0
        self._tries = 0

    def lost(self, **why: object) -> float:
        """Record that the stream broke or could not be opened. Returns the seconds until the next try.

        Logs the first failure, then one in SAID_EVERY_S, so that the log of a long outage stays readable.
        """
        now = self._clock()
        if self._since is None:
            self._since = self._said = now
            self._log.warning("coordinator stream broke", extra=why)
        elif now - self._said >= SAID_EVERY_S:
            self._said = now
            away = {"away_s": round(now - self._since, 1), "tries": self._tries}
            self._log.warning("coordinator still away", extra={**why, **away})
        return self.pause()

    def pause(self) -> float:
        """Seconds until the next try: exponential back-off with jitter, so services do not retry in step."""
        delay = min(AGAIN_AT_MOST_S, AGAIN_FIRST_S * 2.0 ** min(self._tries, 10))
        self._tries += 1
        return delay * random.uniform(0.5, 1.0)

    def up(self) -> None:
        """Record that the coordinator has answered."""
        self._tries = 0
        if self._since is not None:
            away_s = round(self._clock() - self._since, 1)
            self._since = None
            self._log.info("coordinator stream is up again", extra={"away_s": away_s})
