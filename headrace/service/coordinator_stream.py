"""What both ends of the coordinator's streams agree on: how long a line may be silent, how soon a lost one is
tried again, and what is logged of an outage.

A line on which packets vanish (a node that is gone, a proxy that has lost its way) looks like one on which
nothing happens. Both ends therefore ping, and give it up when no answer comes. From the last packet to the
stream being up again takes at most PING_EVERY_S + PONG_WITHIN_S + AGAIN_AT_MOST_S and the connecting, where
the way is open again by then: under 15 s.
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
"""An attempt to connect that takes longer is given up: the next one may meet a way that is open."""
AGAIN_FIRST_S = 0.2
AGAIN_AT_MOST_S = 2.0
SAID_EVERY_S = 60.0
"""An outage that lasts is logged so often."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A manifest names every tensor of the model."""


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


_BOTH: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _ms(PING_EVERY_S)),
    ("grpc.keepalive_timeout_ms", _ms(PONG_WITHIN_S)),
    ("grpc.http2.ping_timeout_ms", _ms(PONG_WITHIN_S)),  # a minute unless it is told, whatever the line above
    # gRPC pings twice while no data flows, and then only once a minute, unless it is told that it may.
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
    # A server that is pinged more often than it permits ends the connection (GOAWAY, too_many_pings).
    ("grpc.http2.min_ping_interval_without_data_ms", _ms(PING_EVERY_S / 4)),
    ("grpc.keepalive_permit_without_calls", 1),  # a ping may cross with the end of a stream
    ("grpc.so_reuseport", 0),  # a second coordinator on one port is an error, not a partner
)


class TokenRefused(RuntimeError):
    """The coordinator does not accept this service's token. The token was read once, at the start, so asking
    again changes nothing: the service ends with EX_CONFIG (`endings` says what a restart does)."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"the coordinator at {address} refuses the token: give this service the HEADRACE_TOKEN that the "
            "coordinator has, and start it again. In a cluster both read it from the run's Secret, key "
            "token, when their containers start; docs/security.md, Credentials, says how it is replaced"
        )


class CoordinatorRefused(RuntimeError):
    """The coordinator does not take this service in as it is configured; asking again changes nothing."""


class Outage:
    """Whether one stream is up, over all its connections. For one thread or one event loop."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._since: float | None = None
        self._said = 0.0
        self._tries = 0

    def lost(self, **why: object) -> float:
        """The stream broke, or could not be opened. Returns the seconds until the next try.

        The first time is logged, then one in SAID_EVERY_S: the log of a long outage stays readable.
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
        """Seconds until the next try: longer each time, and not the same for all after a restart."""
        delay = min(AGAIN_AT_MOST_S, AGAIN_FIRST_S * 2.0 ** min(self._tries, 10))
        self._tries += 1
        return delay * random.uniform(0.5, 1.0)

    def up(self) -> None:
        """The coordinator has said something."""
        self._tries = 0
        if self._since is not None:
            away_s = round(self._clock() - self._since, 1)
            self._since = None
            self._log.info("coordinator stream is up again", extra={"away_s": away_s})
