"""What processes listen on: inet sockets, and Unix sockets with who may connect to them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.connections.net import is_loopback

_LISTENS = 0x10000
"""In the flags of /proc/net/unix."""
_CONNECT_S = 2.0


@dataclass(frozen=True, order=True)
class Listener:
    process: str
    address: str
    port: int
    kind: str = "tcp"

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.address.removeprefix("::ffff:"))  # gRPC binds such a mapped address


def tree_of(pid: int) -> set[int]:
    """Ids of a process and of all that it has started, directly or not."""
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def listeners(pids: Iterable[int]) -> set[Listener]:
    """TCP sockets that listen, and UDP sockets that take from anybody."""
    wanted = set(pids)
    found = set()
    for c in psutil.net_connections("inet"):
        udp = c.type == socket.SOCK_DGRAM
        if c.pid in wanted and (not c.raddr if udp else c.status == psutil.CONN_LISTEN):
            assert c.laddr, "it takes from others, and has no address"
            found.add(Listener(command_of(c.pid)[:160], c.laddr.ip, c.laddr.port, "udp" if udp else "tcp"))
    return found


def command_of(pid: int) -> str:
    """Its command line; its number when it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return str(pid)


def open_unix_sockets(pids: Iterable[int]) -> set[str]:
    """Unix sockets of these processes to which users other than ours may connect: name and why."""
    found = set()
    for name in unix_sockets(pids):
        if name.startswith("@") or not name:
            found.add(f"{name}: an abstract name, which has no permissions")
        elif _others_may_connect(Path(name)):
            found.add(f"{name}: others may write to it")
    return found


def unix_sockets(pids: Iterable[int]) -> set[str]:
    """Names of the Unix sockets on which these processes listen."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
        if int(flags, 16) & _LISTENS and inode in inodes:
            found.add(path[0] if path else "")
    return found


def _others_may_connect(path: Path) -> bool:
    try:
        socket_mode = path.stat().st_mode
        parents = [parent.stat().st_mode for parent in path.parents]
    except FileNotFoundError:
        return False
    return bool(socket_mode & stat.S_IWOTH) and all(mode & stat.S_IXOTH for mode in parents)


def _socket_inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def outward() -> tuple[str, str] | None:
    """Interface and IPv4 address on which others reach this machine; None where there is no network."""
    for name, addresses in psutil.net_if_addrs().items():
        for a in addresses:
            if a.family == socket.AF_INET and not is_loopback(a.address):
                return name, a.address
    return None


def other_addresses() -> list[str]:
    """Of this machine, but not those on which a loopback listener listens.

    127.0.0.2 stands for them where there is no network: it reaches what listens on every interface, and
    nothing that listens on 127.0.0.1.
    """
    found = ["127.0.0.2"]
    for addresses in psutil.net_if_addrs().values():
        for a in addresses:
            if a.family in (socket.AF_INET, socket.AF_INET6) and not is_loopback(a.address):
                found.append(a.address)
    return found


def answers(address: str, port: int) -> bool:
    """Whether something takes a TCP connection there."""
    try:
        with socket.create_connection((address, port), _CONNECT_S):
            return True
    except OSError:
        return False
