"""Ports for services that bind them later, and paths of Unix sockets."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from headrace.connections import net


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two services of one run would be told the same one, and whoever loads longer could not have it."""
    monkeypatch.setattr(net, "_given", set())
    drawn = iter([20001, 20001, 20002])
    monkeypatch.setattr(random, "randint", lambda low, high: next(drawn))
    assert [net.free_port(), net.free_port()] == [20001, 20002]


def test_a_port_is_below_those_of_clients_and_free() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in {net.free_port() for _ in range(50)}:
        assert port < lowest
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "_given", set())
    taken = net.free_port()
    monkeypatch.setattr(net, "_given", set())
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", taken))
        other = net.free_port()
        drawn = iter([taken, other])
        monkeypatch.setattr(net, "_given", set())
        monkeypatch.setattr(random, "randint", lambda low, high: next(drawn))
        assert net.free_port() == other


def test_loopback_is_what_no_other_machine_reaches() -> None:
    assert all(map(net.is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(net.is_loopback, ("0.0.0.0", "::", "10.0.0.1", "fd00::1", "coordinator", "")))


def test_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        "lo": [SimpleNamespace(address="127.0.0.1")],
        "eth0": [SimpleNamespace(address="10.1.2.3"), SimpleNamespace(address="fe80::1%eth0")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    assert [net.interface_of(a) for a in ("127.0.0.2", "::1", "10.1.2.3", "fe80::1")] == [
        *("lo", "lo", "eth0", "eth0")
    ]
    with pytest.raises(ValueError, match=r"no network interface of this machine has the address 10\.0\.0\.9"):
        net.interface_of("10.0.0.9")


def test_loopback_is_called_as_gloo_and_nccl_are_told() -> None:
    assert net.LOOPBACK_INTERFACE in psutil.net_if_addrs()


def test_a_path_and_its_address() -> None:
    for path in (Path("/tmp/a.sock"), Path("/tmp/a b%41#é?:1/a.sock")):
        assert net.unix_path(net.unix_address(path)) == path
    assert net.unix_path("127.0.0.1:50051") is None
    assert net.address_facing("unix:/tmp/a.sock") == "127.0.0.1"
    assert net.address_facing("127.0.0.1:50051") == "127.0.0.1"


def test_a_path_is_claimed_once(tmp_path: Path) -> None:
    held = net.claimed_path(tmp_path / "a.sock")
    with pytest.raises(net.PortTaken, match=r"a\.sock: another process does"):
        net.claimed_path(tmp_path / "a.sock")
    os.close(held)  # as the kernel does when the process is killed
    os.close(net.claimed_path(tmp_path / "a.sock"))
    with pytest.raises(net.PortTaken, match="No such file or directory"):
        net.claimed_path(tmp_path / "none" / "a.sock")
    with pytest.raises(net.PortTaken, match="at most 107 bytes"):
        net.claimed_path(tmp_path / ("é" * 60))
