"""Metrics of services without an HTTP server of their own."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from headrace.connections.net import free_port
from headrace.service.metrics_server import serve_metrics


def test_they_are_served() -> None:
    registry, port = CollectorRegistry(), free_port()
    Counter("done", "Done.", registry=registry).inc(3)
    serve_metrics("127.0.0.1", port, registry)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert b"done_total 3.0" in opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10).read()


def test_a_port_that_is_taken_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serve_metrics("127.0.0.1", taken.getsockname()[1])
    assert caplog.messages == ["metrics are not served"]


def test_port_0_is_none() -> None:
    serve_metrics("no such host", 0)
