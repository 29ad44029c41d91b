"""The coordinator's process: killed, stopped, refused a start, and what it refuses; with scripted peers."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.config import identity
from headrace.config.loading import load
from headrace.config.redis_memory import needed_bytes
from headrace.connections.variables import bearer
from headrace.ledger import keys, ops
from headrace.service.coordinator_stream import TokenRefused
from headrace.service.exit_codes import common_exit_code
from headrace.system.endings import EX_CONFIG, EX_OSERR
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_trainer.launch.launch_stream import LaunchStream
from headrace_trainer.sync.sync_client import SyncClient, SyncRefused
from headrace_trainer.worker import exit_code
from tests.process.coordinator.test_coordinator import FIRST, REUSED, Make, make, sync, two, valkey
from tests.process.coordinator.test_half_open import member_at
from tests.support.coordinator_peers import Member, Peer, Trainer
from tests.support.coordinator_process import Coordinator, until

__all__ = ["make", "valkey"]


async def test_killed_before_the_commit(make: Make) -> None:
    c = await make()
    a, b, trainer = await two(c, version=0)
    term = c.stats().term
    b.silence("load")
    trainer.begin(1)
    await c.waits_for("transferring", "b")
    await a.expect("pause", "load")
    await b.expect("pause", "load")
    c.kill()
    for peer in (a, b, trainer):
        await peer.ended()
    await trainer.expect("send")
    b.answers.clear()
    await c.up()
    assert c.stats().version == 0
    assert c.stats().term == term + 1

    # Half-loaded engines that say "version 0" are members of version 0, and must not be resumed.
    marks = [len(peer.heard) for peer in (a, b, trainer)]
    for peer in (a, b, trainer):
        await peer.connect()
        await peer.expect("welcome")
    assert list((await c.status()).members) == ["a", "b"]
    await sync(trainer, 1, {a: FIRST, b: FIRST})
    for one, mark in zip((a, b, trainer), marks, strict=True):
        assert {command.term for command in one.heard[mark:]} == {term + 1}
    assert c.stats().members == {"a": 1, "b": 1}
    await sync(trainer, 2, {a: REUSED, b: REUSED})


async def refusal(peer: Peer) -> bool:
    """Whether the server's answer is that. grpc.aio says INTERNAL when it comes while the hello is sent."""
    await peer.connect()
    code = await peer.ended()
    assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
    return code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_port_that_strangers_reach_needs_a_token(make: Make) -> None:
    """An empty value in a Secret must not switch authentication off."""
    c = await make(up=False)
    c.start("--host", "0.0.0.0", token=" \n")
    assert await c.exit_code() == 78
    assert "HEADRACE_TOKEN is empty, and 0.0.0.0 is no loopback address" in c.log()


async def test_on_a_unix_socket_it_is_the_only_one_and_follows_one_that_was_killed(make: Make) -> None:
    """As `headrace run` starts it. gRPC alone lets a second server take the path of one that is alive."""
    c = await make()
    c.kill()
    with tempfile.TemporaryDirectory(prefix="a %41é", dir="/tmp") as folder:
        path = Path(folder) / "coordinator.sock"
        c.socket = path
        await c.up()
        assert c.address.startswith("unix:/tmp/a%20%2541")
        member = await c.member("a")
        first = c.process
        assert first is not None
        try:
            c.start()
            assert await c.exit_code() == EX_OSERR
            assert f"cannot listen on {path}: another process does" in c.log()
            assert member.status is None, "its stream goes on"
        finally:
            first.kill()
            first.wait(10)
        assert path.exists(), "left behind"
        await c.up()
        await c.member("b")


async def test_the_token_is_asked_for(make: Make) -> None:
    c = await make()
    for token in ("", "wrong"):
        await is_refused(c, token)
    assert (await c.status()).joiners == []


async def is_refused(c: Coordinator, token: str) -> None:
    peers: list[Peer] = [Member(c.address, "a"), Trainer(c.address, 1)]
    c.peers += peers
    for peer in peers:
        peer.token = token
        await until(partial(refusal, peer), f"{peer} to be refused")
        assert peer.heard == []
    async with grpc.aio.insecure_channel(c.address) as channel:
        stub = sync_pb2_grpc.CoordinatorStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetStatus(pb.GetStatusRequest(), metadata=bearer(token), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "HEADRACE_TOKEN" in (refused.value.details() or "")
        unknown = channel.unary_unary("/headrace.v1.Coordinator/Unknown")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unknown(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

        # Probes and tools get in.
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "headrace.v1.Coordinator"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for found in reflection.ServerReflectionInfo(iter([request]), timeout=10):
            names = {service.name for service in found.list_services_response.service}
            assert "headrace.v1.Coordinator" in names


async def test_a_refused_token_ends_each_service_alike(make: Make) -> None:
    """With the code of a configuration that cannot be used, and a sentence that says what to do."""
    c = await make()
    nothing: Any = None
    trainer = SyncClient(nothing, 1, "127.0.0.1", 1, c.address, "wrong", lambda _: None)
    node = LaunchStream(c.address, "wrong", "node-0", 2, "127.0.0.1:1")
    try:
        with pytest.raises(TokenRefused) as of_member:
            async with asyncio.timeout(20):
                await member_at(c.address, "wrong").run()
        with pytest.raises(SyncRefused) as of_trainer:
            await asyncio.to_thread(trainer.committed, 20.0)
        with pytest.raises(TokenRefused) as of_node:
            await asyncio.to_thread(node.wait, lambda: False)
    finally:
        await asyncio.to_thread(trainer.close)
        await asyncio.to_thread(node.close)
    refused = [found.value for found in (of_member, of_trainer, of_node)]
    codes = (common_exit_code(of_member.value), exit_code(of_trainer.value), common_exit_code(of_node.value))
    assert set(codes) == {EX_CONFIG}
    said = {str(error) for error in refused}
    assert len(said) == 1
    text = said.pop()
    assert "give this service the HEADRACE_TOKEN that the coordinator has" in text
    assert "wrong" not in text


async def test_a_port_that_is_taken(make: Make) -> None:
    c = await make(up=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        c.port = taken.getsockname()[1]
        c.start()
        assert await c.exit_code() == EX_OSERR
    assert f"cannot listen on 127.0.0.1:{c.port}" in c.log()
    assert "Traceback" not in c.log()
    assert c.stats().term == 0  # it never served, so it must fence nobody out


async def test_a_file_that_the_run_cannot_go_on_with(make: Make) -> None:
    """Refused while it ran, and again by every start until it is mended; nobody is fenced out by that."""
    c = await make(up=False)
    file = c.folder / "run.yaml"
    config = load(file)
    c.ledger.redis.hset(keys.meta(config.name), "fingerprint", json.dumps(identity.of(config)))
    right = file.read_text()
    file.write_text(right.replace("path: nowhere", "path: elsewhere"))
    c.start()
    assert await c.exit_code() == 78
    assert "model.path: was 'nowhere' when the run" in c.log()
    assert "Traceback" not in c.log()

    file.write_text(right)
    c.ledger.redis.config_set("maxmemory", needed_bytes(config) - 1)
    try:
        c.start()
        assert await c.exit_code() == 78
    finally:
        c.ledger.redis.config_set("maxmemory", 0)
    assert " and async_training.staleness_threshold: " in c.log()
    assert "Traceback" not in c.log()
    assert c.stats().term == 0


async def test_redis_that_does_not_answer(make: Make) -> None:
    c = await make(up=False, redis={"connect_timeout_s": 1.0}, services={"start_timeout_s": 2.0})
    c.url = "redis://:secret@127.0.0.1:1/0"
    started = time.monotonic()
    c.start()
    assert await c.exit_code(15.0) == 69
    assert time.monotonic() - started < 15.0
    assert "127.0.0.1:1" in c.log()
    assert "secret" not in c.log()
    assert "Traceback" not in c.log()


async def test_one_that_nobody_has_joined_ends_when_another_takes_over(make: Make) -> None:
    c = await make()
    c.ledger.run(ops.open_term())  # as the second one does at its start
    assert await c.exit_code(10.0) == 1
    assert "term 1 is over, 2 has begun: another coordinator runs" in c.log()
    assert "Traceback" not in c.log()


async def test_it_ends_in_order(make: Make) -> None:
    c = await make()
    a, b, trainer = await two(c, version=0)
    assert c.process is not None
    c.process.terminate()
    assert await c.exit_code(10.0) == 0
    for peer in (a, b, trainer):
        assert await peer.ended() is grpc.StatusCode.OK
    assert "Traceback" not in c.log()
