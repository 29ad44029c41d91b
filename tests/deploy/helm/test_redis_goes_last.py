"""The bundled Redis, when it is told to stop, waits for those that save: its hook against a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from headrace.connections.redis_client import connect
from headrace.local.valkey_server import ValkeyServer, start_valkey
from tests.deploy.helm import charts
from tests.deploy.helm.objects import pods
from tests.waiting import until

WORD = "the-word"
CLI = f"""#!{sys.executable}
# As valkey-cli, which the server's image has: the reply as it is, one line after the other.
import os, sys, redis
with open("calls", "a") as calls:
    calls.write("+")
option, port, *command = sys.argv[1:]
assert option == "-p"
connection = redis.Connection("127.0.0.1", int(port), password=os.environ["REDISCLI_AUTH"], lib_name=None)
connection.send_command(*command)
print(connection.read_response().decode())
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path / "redis", WORD) as made:
        yield made


@pytest.fixture
def hook(tmp_path: Path, server: ValkeyServer) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the hook, with `changes` of its text."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-cli").write_text(CLI)
    (tmp_path / "bin" / "valkey-cli").chmod(0o755)
    (pod,) = [pod for pod in pods(charts.rendered()) if pod.component == "redis"]
    shell, option, script = pod.spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    started: list[subprocess.Popen[bytes]] = []

    def start(**changes: str) -> subprocess.Popen[bytes]:
        text = script
        for old, new in {"-p 6379 ": f"-p {server.port} ", "sleep 1;": "sleep 0.2;", **changes}.items():
            assert old in text
            text = text.replace(old, new)
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "REDISCLI_AUTH": WORD}
        started.append(subprocess.Popen([shell, option, text], env=env, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def client(server: ValkeyServer) -> redis.Redis:
    made = connect(server.url)
    made.ping()
    return made


def looks(folder: Path) -> int:
    return len((folder / "calls").read_text()) if (folder / "calls").exists() else 0


def looks_on(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """It has looked at what the test has just done, and waits."""
    now = looks(folder)
    until(lambda: looks(folder) >= now + 2 or process.poll() is not None, "another look", 30.0)
    assert process.poll() is None


def test_it_waits_for_who_was_there_and_for_nobody_else(
    server: ValkeyServer, hook: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    first, second = client(server), client(server)
    process = hook()
    looks_on(tmp_path, process)
    late = client(server)  # of a pod that is started anew
    first.close()
    looks_on(tmp_path, process)
    second.close()
    assert process.wait(30) == 0
    late.close()
    assert hook().wait(30) == 0, "nobody is there"


def test_it_goes_when_it_alone_is_restarted(
    server: ValkeyServer, hook: Callable[..., subprocess.Popen[bytes]]
) -> None:
    with client(server):
        assert hook(**{"-ge 20 ": "-ge 1 "}).wait(30) == 0


def test_it_waits_no_longer_than_they_may_take(
    server: ValkeyServer, hook: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with client(server):
        second = client(server)
        process = hook(**{"-lt 120 ": "-lt 4 "})
        until(lambda: looks(tmp_path) > 0, "a look", 30.0)
        second.close()
        assert process.wait(60) == 0
        assert looks(tmp_path) >= 4, "the first is still there"
