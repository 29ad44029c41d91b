"""Small network questions that every service asks."""

from __future__ import annotations

import socket


def interface_address(peer: str) -> str:
    """The local address that faces `peer` (no packet is sent)."""
    family = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
