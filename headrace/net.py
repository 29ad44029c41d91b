"""Small network questions that every service asks."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""Environment variables: on which network interface their listeners are."""
LOOPBACK_INTERFACE = "lo"


class PortTaken(OSError):
    """A service cannot listen where it is told to."""


def interface_address(peer: str) -> str:
    """The local address that faces `peer` (no packet is sent)."""
    family = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether `host` is an address (or the name) of this machine that no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(address: str) -> str:
    """The network interface that has `address`. Raises ValueError when none of this machine has."""
    if is_loopback(address):
        return LOOPBACK_INTERFACE
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in found):
            return name
    raise ValueError(f"no network interface of this machine has the address {address}")


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound and not listening yet: nobody else gets the port, and a probe is refused until it is served.

    Raises PortTaken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return found


_LOWEST, _HIGHEST = 15000, 32767
_TRIES = 100
_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, never the same twice in one process.

    Below those that Linux hands to clients (32768 and up): a service binds it seconds later, and by then a
    connection of anybody could have got it.
    """
    for _ in range(_TRIES):
        port = random.randint(_LOWEST, _HIGHEST)
        if port in _given:
            continue  # nobody has bound it yet, so that it would pass for free
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            _given.add(port)
            return port
    raise OSError(f"no free port on {host} between {_LOWEST} and {_HIGHEST}")
