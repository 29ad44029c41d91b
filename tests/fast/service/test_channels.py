"""Channels between services: a proxy for downloads, which the environment names, is not theirs."""

from __future__ import annotations

import asyncio
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.connections import tls
from headrace.connections.net import free_port

DEADLINE_S = 10.0


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_no_proxy_is_asked(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*tls.VARIABLES, "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    request = health_pb2.HealthCheckRequest()

    async def from_asyncio() -> int:
        async with tls.aio_channel(address, ()) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
            return int(reply.status)

    try:
        with tls.channel(address, ()) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert (reply.status, asyncio.run(from_asyncio())) == (serving, serving)
    finally:
        server.stop(0)
