"""Network helpers that every service uses: interfaces, sockets, free ports."""

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
"""Environment variables that name the network interface on which the library listens."""
LOOPBACK_INTERFACE = "lo"


class PortTaken(OSError):
    """A service cannot listen on its configured address."""


def interface_address(peer: str) -> str:
    """Return the local address used to reach `peer`. No packet is sent."""
    family = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`, which no other machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(address: str) -> str:
    """Return the network interface that has `address`. Raises ValueError if this machine has none."""
    if is_loopback(address):
        return LOOPBACK_INTERFACE
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in found):
            return name
    raise ValueError(f"no network interface of this machine has the address {address}")


_UNIX = "unix:"
LONGEST_SOCKET = 107
"""Maximum length of a Unix socket's path, in bytes (`sun_path` less its terminating NUL)."""


def unix_address(path: Path) -> str:
    """Return the gRPC target of the Unix socket at `path`, percent-encoded."""
    return f"{_UNIX}{quote(str(path))}"


def unix_path(address: str) -> Path | None:
    """Return the path in a `unix:` address; None for `host:port`."""
    return Path(unquote(address.removeprefix(_UNIX))) if address.startswith(_UNIX) else None


def address_facing(server: str) -> str:
    """Return the address of this host that other clients of `server` can reach.

    Loopback if `server` is a Unix socket rather than `host:port`: all of its clients are on this machine.
    """
    if unix_path(server) is not None:
        return "127.0.0.1"
    return interface_address(server.rsplit(":", 1)[0])


def claimed_path(path: Path) -> int:
    """Lock `path` for a Unix socket and return the descriptor that holds the lock until it is closed.

    A server that listens on `path` replaces any existing file, since a killed process leaves its socket
    behind. The lock keeps a second server from replacing the socket of a live one. Raises PortTaken.
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
    """Return a socket that is bound but not listening.

    The port is reserved, and probes are refused until it is served.

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
    """Return a port that was free a moment ago. One process never gets the same port twice.

    Ports are below Linux's ephemeral range (32768 and up). A service binds its port seconds later, and in
    the meantime any outgoing connection could take an ephemeral one.
    """
    for _ in range(_TRIES):
        port = random.randint(_LOWEST, _HIGHEST)
        if port in _given:
            continue  # handed out but perhaps not bound yet, so the probe below would succeed
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            _given.add(port)
            return port
    raise OSError(f"no free port on {host} between {_LOWEST} and {_HIGHEST}")
