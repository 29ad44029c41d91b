"""Ports for services that bind them later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from headrace import net


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
