"""Small network questions that every service asks."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import random
import socket
from pathlib import Path
from urllib.parse import quote, unquote

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


_UNIX = "unix:"
LONGEST_SOCKET = 107
"""Bytes that the path of a Unix socket may have."""


def unix_address(path: Path) -> str:
    """How gRPC writes the path of a Unix socket, whatever characters that has."""
    return f"{_UNIX}{quote(str(path))}"


def unix_path(address: str) -> Path | None:
    """The path in such an address; None for `host:port`."""
    return Path(unquote(address.removeprefix(_UNIX))) if address.startswith(_UNIX) else None


def address_facing(server: str) -> str:
    """This host's address for peers of its, of those that reach `server`, a `host:port`: loopback where that
    is a Unix socket, which nobody else reaches."""
    if unix_path(server) is not None:
        return "127.0.0.1"
    return interface_address(server.rsplit(":", 1)[0])


def claimed_path(path: Path) -> int:
    """A descriptor; as long as it is open, nobody else who asks gets `path` for a Unix socket.

    Who listens there replaces the file that is there, which one that was killed has left behind. Without
    this, a second start would do so to one that is alive. Raises PortTaken.
    """
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        raise PortTaken(f"cannot listen on {path}: a socket's path has at most {LONGEST_SOCKET} bytes")
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PortTaken(f"cannot listen on {path}: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        why = "another process does" if isinstance(error, BlockingIOError) else error.strerror
        raise PortTaken(f"cannot listen on {path}: {why}") from None
    return descriptor


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
