"""TLS between the services, with certificates made on the spot: who is let in, and when they are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest
import redis
import trustme
from cryptography.hazmat.primitives import serialization

from headrace.connections import tls
from headrace.connections.redis_client import connect_async
from headrace.local.valkey_server import ValkeyServer, start_valkey
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_queue import startup
from headrace_queue.loops import Fatal
from tests.support.coordinator_peers import TOKEN
from tests.support.coordinator_process import PASSWORD, Coordinator, bearer, until


def write(folder: Path, ca: trustme.CA, name: str = "127.0.0.1") -> dict[str, str]:
    """A certificate of `ca` for `name`; returns the environment that names it."""
    folder.mkdir(exist_ok=True)
    issued = ca.issue_cert(name)
    paths = {name: folder / f"{name.lower()}.pem" for name in tls.VARIABLES}
    cert, key, authority = paths.values()
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    ca.cert_pem.write_to_path(authority)
    return {name: str(path) for name, path in paths.items()}


Use = Callable[[dict[str, str]], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Set the environment's TLS files; an empty dictionary takes them away."""

    def set_to(files: dict[str, str]) -> None:
        for name in tls.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in files.items():
            monkeypatch.setenv(name, value)

    set_to({})
    return set_to


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path_factory.mktemp("valkey"), PASSWORD) as server:
        yield server


async def ask(address: str, token: str = TOKEN) -> str:
    """What a peer with the environment's files gets: "ok", or the name of the error."""
    async with tls.aio_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            stub = sync_pb2_grpc.CoordinatorStub(channel)
            await stub.GetStatus(pb.GetStatusRequest(), metadata=bearer(token), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "ok"


async def test_the_coordinator_lets_in_whom_its_authority_knows(
    tmp_path: Path, valkey: ValkeyServer, use: Use
) -> None:
    ours, others = trustme.CA(), trustme.CA()
    served = write(tmp_path / "server", ours)
    use(served)
    c = await Coordinator(tmp_path / "tls", valkey, {}).up()
    try:
        client = write(tmp_path / "client", ours, "rollouter")
        use(client)
        assert await ask(c.address) == "ok"
        assert await ask(c.address, "wrong") == "UNAUTHENTICATED"  # the token is asked for all the same
        use(write(tmp_path / "stranger", others, "rollouter"))
        assert await ask(c.address) == "UNAVAILABLE"
        stranger_that_trusts_us = {
            **write(tmp_path / "s", others),
            "HEADRACE_TLS_CA": client["HEADRACE_TLS_CA"],
        }
        use(stranger_that_trusts_us)
        assert await ask(c.address) == "UNAVAILABLE"
        use({})
        assert await ask(c.address) == "UNAVAILABLE"
        # A new authority, written in place: the next handshake asks for it, nothing is restarted.
        write(tmp_path / "server", others)
        use(write(tmp_path / "stranger", others, "rollouter"))
        await until(lambda: asyncio.ensure_future(_is_ok(c.address)), "the new certificate to be served")
        use(client)
        assert await ask(c.address) == "UNAVAILABLE"
        assert c.process is not None
        assert c.process.poll() is None
    finally:
        await c.close()


async def _is_ok(address: str) -> bool:
    return await ask(address) == "ok"


@contextlib.asynccontextmanager
async def in_front_of(port: int, files: dict[str, str]) -> AsyncIterator[int]:
    """A TLS server that hands everything on to a plain one (the bundled Valkey is built without TLS)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files["HEADRACE_TLS_CA"])
    context.load_cert_chain(files["HEADRACE_TLS_CERT"], files["HEADRACE_TLS_KEY"])
    context.verify_mode = ssl.CERT_REQUIRED

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, out = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, out), pump(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_redis_behind_tls(tmp_path: Path, valkey: ValkeyServer, use: Use) -> None:
    ours, others = trustme.CA(), trustme.CA()
    async with in_front_of(valkey.port, write(tmp_path / "redis", ours)) as port:
        url = f"rediss://:{PASSWORD}@127.0.0.1:{port}/0"
        use(write(tmp_path / "queue", ours, "queue"))
        for client in (connect_async(url), await startup.connect(url, 10.0)):
            assert await client.ping()
            await client.aclose()
        with pytest.raises(Fatal, match="refuses the login"):
            await startup.connect(url.replace(PASSWORD, "wrong"), 10.0)
        use(write(tmp_path / "stranger", others, "queue"))
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await connect_async(url).ping()
        with pytest.raises(Fatal, match="did not answer"):
            await startup.connect(url, 0.5)
        use({})
        with pytest.raises(redis.ConnectionError):
            await connect_async(url).ping()


def test_what_the_environment_may_say(tmp_path: Path, use: Use) -> None:
    files = write(tmp_path / "some", trustme.CA())
    use({"HEADRACE_TLS_CERT": files["HEADRACE_TLS_CERT"]})
    with pytest.raises(tls.TlsError, match="HEADRACE_TLS_KEY and HEADRACE_TLS_CA not set"):
        tls.wait(60.0)  # that will not pass
    use({**files, "HEADRACE_TLS_KEY": str(tmp_path / "nowhere.pem")})
    with pytest.raises(tls.TlsError, match=r"HEADRACE_TLS_KEY: .*nowhere\.pem cannot be read.* after 0.1 s"):
        tls.wait(0.1)
    use(files)
    tls.wait(0.0)
    tls.wait(0.0, f"rediss://h/0?ssl_ca_certs={files['HEADRACE_TLS_CA']}")
    assert tls.redis_options("redis://h/0") == {}
    assert tls.redis_options("rediss://h/0?ssl_ca_certs=/mine") == {}


def test_files_that_grpc_could_not_use_are_named(tmp_path: Path, use: Use) -> None:
    ours, other = write(tmp_path / "ours", trustme.CA()), write(tmp_path / "other", trustme.CA())
    cert, key, ca = tls.VARIABLES
    half, no_pem, locked = (tmp_path / name for name in ("half", "no_pem", "locked"))
    whole = Path(ours[cert]).read_bytes()
    half.write_bytes(whole + whole[: len(whole) // 2])
    no_pem.write_bytes(b"\xffnothing")
    secret = serialization.load_pem_private_key(Path(ours[key]).read_bytes(), None)
    pem, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(secret.private_bytes(pem, kind, serialization.BestAvailableEncryption(b"word")))
    for files, why in (
        ({cert: str(half)}, rf"{cert}: {half} is no certificate in PEM, or not the whole of it"),
        ({ca: str(no_pem)}, rf"{ca}: {no_pem} is no certificate in PEM"),
        ({ca: str(tmp_path)}, rf"{ca}: {tmp_path} cannot be read"),
        ({key: str(no_pem)}, rf"{key}: {no_pem} is no private key in PEM"),
        ({key: str(locked)}, rf"{key}: {locked} is no private key in PEM without a password"),
        ({key: other[key]}, rf"{key}: .*key.pem is not the key of the certificate in .*ours"),
    ):
        use(ours | files)
        with pytest.raises(tls.TlsError, match=why):
            tls.wait(0.0)
        with pytest.raises(tls.NotUsable, match=why):
            tls.channel("127.0.0.1:1", ())
    use({})
    with pytest.raises(tls.TlsError, match=f"ssl_ca_certs of the Redis URL: {no_pem} is no certificate"):
        tls.wait(0.0, f"rediss://:secret@h/0?ssl_ca_certs={no_pem}")
    with pytest.raises(tls.TlsError, match="nowhere cannot be read: No such file"):
        tls.wait(0.0, "rediss://h/0?ssl_ca_certs=/nowhere")
    tls.wait(0.0, f"redis://h/0?ssl_ca_certs={no_pem}")
