"""One stream for all services: how it ends, and how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import trustme

from headrace.connections import tls
from headrace.connections.net import free_port
from headrace.service.coordinator_stream import CoordinatorRefused
from headrace.service.reconnecting_stream import ReconnectingStream
from headrace.service.shell import last_words
from headrace.system.endings import EX_CONFIG
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_coordinator.servicer import TokenInterceptor
from headrace_rollouter import service as rollouter
from headrace_rollouter.membership.member import Member
from headrace_trainer import service as launcher
from headrace_trainer import worker
from headrace_trainer.launch.launch_stream import LaunchStream
from headrace_trainer.sync.sync_client import SyncClient

TOKEN = "the-token"
LIMIT_S = 15.0


class Coordinator(sync_pb2_grpc.CoordinatorServicer):
    """Notes what it hears over each connection, and says what it is told to say."""

    def __init__(self) -> None:
        self.heard: list[list[Any]] = []
        self.says: Callable[[int], list[Any]] = lambda _: []
        """The commands of a connection, by its number."""
        self.let_go = asyncio.Event()
        """Ends the present connection."""

    async def Trainer(self, reports: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(())
        self.heard.append(heard := [])

        async def read() -> None:
            async for report in reports:
                heard.append(report)

        reading = asyncio.create_task(read())
        for command in self.says(len(self.heard)):
            yield command
        await self.let_go.wait()
        self.let_go.clear()
        reading.cancel()

    Member = TrainerNode = Trainer


@pytest.fixture
async def coordinator() -> AsyncIterator[tuple[Coordinator, str]]:
    server, found = grpc.aio.server(interceptors=[TokenInterceptor(TOKEN)]), Coordinator()
    sync_pb2_grpc.add_CoordinatorServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield found, f"127.0.0.1:{port}"
    await server.stop(0)


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)  # poll interval
    assert condition(), what


@dataclass
class Client:
    """One of the three that are built on the stream."""

    failure: Callable[[], Exception | None]
    """What has ended it."""
    exit_code: Callable[[Exception], int | None]
    """The table of its process."""
    close: Callable[[], Any]


def member(address: str, token: str, certificates_s: float) -> Client:
    async def nothing() -> None:
        pass

    engine: Any = SimpleNamespace(workers=1, pause=nothing)
    work: Any = SimpleNamespace(version=-1, serving=asyncio.Event())
    config: Any = SimpleNamespace(sync=SimpleNamespace(pause_timeout_s=10.0, rendezvous_timeout_s=10.0))
    made = Member(config, engine, work, "rollouter-0-a", address, token, certificates_s=certificates_s)
    running = asyncio.create_task(made.run())

    async def close() -> None:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def failure() -> Any:
        return running.exception() if running.done() else None

    return Client(failure, rollouter.exit_code, close)


def trainer(address: str, token: str, certificates_s: float) -> Client:
    nothing: Any = None
    made = SyncClient(
        nothing, 1, "127.0.0.1", 1, address, token, lambda _: None, certificates_s=certificates_s
    )
    return Client(lambda: made._failure, worker.exit_code, lambda: asyncio.to_thread(made.close))


def node(address: str, token: str, certificates_s: float) -> Client:
    made = LaunchStream(address, token, "node-0", 1, "127.0.0.1:1", certificates_s)

    def failure() -> Exception | None:
        """What its launcher gets; ranks that are there are ended, for they might wait for a lost peer."""
        if made._failure is None:
            return None
        assert made.over == str(made._failure)
        with pytest.raises(type(made._failure)):
            made.wait(lambda: False)
        return made._failure

    return Client(failure, launcher.exit_code, lambda: asyncio.to_thread(made.close))


CLIENTS = pytest.mark.parametrize("client", [member, trainer, node])
Make = Callable[[str, str, float], Client]


@pytest.fixture
def no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tls.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@CLIENTS
async def test_a_certificate_that_is_not_there_ends_every_service_alike(
    client: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in tls.VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / f"{name}.pem"))
    made = client(f"127.0.0.1:{free_port()}", TOKEN, 0.3)
    await until(made.failure, "its end")
    error = made.failure()
    assert error is not None
    assert f"HEADRACE_TLS_CERT: {tmp_path}/HEADRACE_TLS_CERT.pem cannot be read: No such file" in str(error)
    assert "after 0.3 s of waiting (at most services.start_timeout_s); mount the right file" in str(error)
    assert last_words("service", error, made.exit_code) == EX_CONFIG
    await made.close()


@CLIENTS
async def test_another_token_ends_every_service_alike(
    client: Make, coordinator: tuple[Coordinator, str], no_tls: None
) -> None:
    _, address = coordinator
    made = client(address, "another", 0.0)
    await until(made.failure, "its end")
    error = made.failure()
    assert error is not None
    assert f"the coordinator at {address} refuses the token: give this service the HEADRACE_TOKEN" in str(
        error
    )
    assert last_words("service", error, made.exit_code) == EX_CONFIG
    await made.close()


@CLIENTS
async def test_a_coordinator_that_is_not_there_is_tried_for_ever_and_ends_nobody(
    client: Make, caplog: pytest.LogCaptureFixture, no_tls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []
    real = tls.aio_channel

    def counted(*args: Any) -> Any:
        tries.append(1)
        return real(*args)

    monkeypatch.setattr(tls, "aio_channel", counted)
    address = f"127.0.0.1:{free_port()}"
    made = client(address, TOKEN, 0.0)
    await until(lambda: len(tries) >= 4, "more tries")
    assert made.failure() is None
    told = [r for r in caplog.records if r.getMessage() == "coordinator stream broke"]
    assert [(r.address, r.code) for r in told] == [(address, "StatusCode.UNAVAILABLE")]  # type: ignore[attr-defined]
    async with asyncio.timeout(3.0):
        await made.close()


async def test_a_certificate_that_comes_late_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a Secret that is being mounted. The coordinator's own wait is the same."""
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    cert, key, authority = (tmp_path / f"{name}.pem" for name in ("cert", "key", "ca"))
    for name, file in zip(tls.VARIABLES, (cert, key, authority), strict=True):
        monkeypatch.setenv(name, str(file))
    stream = stream_to(f"127.0.0.1:{free_port()}", certificates_s=60.0)
    running = asyncio.create_task(stream.run())
    await until(lambda: "waiting for certificate files" in caplog.messages, "it to wait")
    cert.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    ca.cert_pem.write_to_path(authority)
    await until(lambda: "coordinator stream broke" in caplog.messages, "an attempt to connect")
    assert not running.done()
    await cancelled(running)


def stream_to(address: str, **more: Any) -> ReconnectingStream[Any, Any]:
    async def nothing(_: object) -> None:
        pass

    said: dict[str, Any] = {
        "certificates_s": 0.0,
        "hello": lambda: [pb.TrainerReport(hello=pb.TrainerHello())],
        "on": nothing,
    } | more
    log = logging.getLogger("a")
    return ReconnectingStream(address, TOKEN, "Trainer", log=log, **said)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_what_came_is_dealt_with_before_the_next_hello(
    coordinator: tuple[Coordinator, str], no_tls: None
) -> None:
    there, address = coordinator
    there.says = lambda number: [pb.TrainerCommand(term=number)] * 2
    did: list[str] = []

    def hello() -> list[pb.TrainerReport]:
        did.append("hello")
        return [pb.TrainerReport(hello=pb.TrainerHello())]

    async def on(command: pb.TrainerCommand) -> None:
        if did == ["hello"]:
            there.let_go.set()
            await until(lambda: not there.let_go.is_set(), "the coordinator to end the connection")
        did.append(f"term {command.term}")

    running = asyncio.create_task(stream_to(address, hello=hello, on=on).run())
    await until(lambda: len(did) >= 6, "two connections")
    assert did == ["hello", "term 1", "term 1", "hello", "term 2", "term 2"]
    await cancelled(running)


async def test_commands_of_an_old_term_are_dropped(
    coordinator: tuple[Coordinator, str], no_tls: None, caplog: pytest.LogCaptureFixture
) -> None:
    there, address = coordinator
    there.says = lambda _: [pb.TrainerCommand(term=number) for number in (2, 1, 3)]
    heard: list[int] = []

    async def on(command: pb.TrainerCommand) -> None:
        heard.append(command.term)

    running = asyncio.create_task(stream_to(address, on=on).run())
    await until(lambda: 3 in heard, "the last command")
    assert heard == [2, 3]
    assert "command of an old term refused" in caplog.messages
    await cancelled(running)


async def test_a_request_is_sent_once_over_each_connection_until_it_is_answered(
    coordinator: tuple[Coordinator, str], no_tls: None
) -> None:
    there, address = coordinator
    answer = pb.TrainerCommand(committed=pb.Committed(version=4))
    there.says = lambda number: [answer] if number == 3 else []
    nothing: Any = None
    client = SyncClient(nothing, 1, "127.0.0.1", 1, address, TOKEN, lambda _: None)
    client.begin(pb.BeginSync(version=4))
    for number in (1, 2, 3):
        await until(lambda number=number: len(there.heard) == number, "a connection")  # type: ignore[misc]
        await until(lambda: len(there.heard[-1]) >= 2, "hello and the request")
        there.let_go.set()
    await until(lambda: len(there.heard) == 4 and there.heard[3], "one connection more")
    kinds = [[report.WhichOneof("report") for report in heard] for heard in there.heard]
    assert kinds == [["hello", "begin"]] * 3 + [["hello"]]
    assert there.heard[3][0].hello.snapshot_version == 4
    committed = client.committed()
    assert committed is not None
    assert committed.version == 4
    await asyncio.to_thread(client.close)


async def test_connections_that_have_ended_leave_no_task_behind(
    coordinator: tuple[Coordinator, str], no_tls: None, caplog: pytest.LogCaptureFixture
) -> None:
    there, address = coordinator
    running = asyncio.create_task(stream_to(address).run())
    for number in range(1, 5):
        await until(lambda number=number: len(there.heard) == number and there.heard[-1], "a hello")  # type: ignore[misc]
        there.let_go.set()
    await until(lambda: len(there.heard) == 5 and there.heard[-1], "one hello more")
    gc.collect()
    assert "Task was destroyed but it is pending!" not in caplog.text, "gRPC's, which reads the reports"
    await cancelled(running)


async def test_after_the_last_report_nobody_comes_back(
    coordinator: tuple[Coordinator, str], no_tls: None
) -> None:
    there, address = coordinator
    stream = stream_to(address)
    running = asyncio.create_task(stream.run())
    await until(lambda: stream.connected, "the connection")
    stream.send_last(pb.TrainerReport())
    await until(lambda: len(there.heard[0]) == 2, "both reports")
    there.let_go.set()
    await asyncio.wait_for(running, LIMIT_S)
    assert (stream.connected, stream.ended.is_set()) == (False, True)


async def test_who_is_refused_for_its_configuration_hears_why(no_tls: None) -> None:
    class Refuses(sync_pb2_grpc.CoordinatorServicer):
        async def Trainer(self, reports: Any, context: Any) -> AsyncIterator[Any]:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "trainer.nnodes is 2 here")
            yield

    server = grpc.aio.server()
    sync_pb2_grpc.add_CoordinatorServicer_to_server(Refuses(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(CoordinatorRefused, match=r"trainer\.nnodes is 2 here"):
            await asyncio.wait_for(stream_to(f"127.0.0.1:{port}").run(), LIMIT_S)
    finally:
        await server.stop(0)
