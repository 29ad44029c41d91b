"""SIGTERM for the first process of a container, which the kernel drops where nobody handles it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from headrace.local.valkey_server import start_valkey
from tests.support.no_rollouter import Processes
from tests.waiting import until

FIRST = ("unshare", "--pid", "--fork", "--kill-child")
"""What follows is the first process of a namespace of its own."""


def may_unshare() -> bool:
    try:
        return subprocess.run([*FIRST, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not may_unshare(), reason="needs the right to make a PID namespace")

_BLOCKS = "import os, time; open(os.environ['BLOCKED'], 'w').close(); time.sleep(600)\n"


def terminate(process: subprocess.Popen[bytes]) -> int:
    """The first process of the namespace gets SIGTERM; its exit code, which `unshare` hands on."""
    (first,) = psutil.Process(process.pid).children()
    first.send_signal(signal.SIGTERM)
    return process.wait(15.0)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    ("words", "blocked", "code"),
    [
        (["headrace_queue"], "pydantic", 0),
        (["headrace_coordinator"], "pydantic", 0),
        (["headrace_rollouter"], "pydantic", 0),
        (["headrace_trainer"], "pydantic", 75),
        (["headrace.demo"], "torch", 143),
    ],
)
def test_during_the_imports(
    tmp_path: Path,
    started: list[subprocess.Popen[bytes]],
    words: Sequence[str],
    blocked: str,
    code: int,
) -> None:
    (tmp_path / f"{blocked}.py").write_text(_BLOCKS)
    env = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "BLOCKED": str(tmp_path / "blocked"),
    }
    started.append(subprocess.Popen([*FIRST, sys.executable, "-m", *words], env=env, cwd=tmp_path))
    until(lambda: (tmp_path / "blocked").exists() or started[0].poll() is not None, "the import")
    assert terminate(started[0]) == code


def test_while_it_waits_for_another_service(tmp_path: Path) -> None:
    """A coordinator without a queue service, which it waits for up to `services.start_timeout_s`."""
    with start_valkey(tmp_path / "redis", "secret") as server:
        run = Processes.make(tmp_path, server)
        try:
            run.start("coordinator", "secret", FIRST)

            def waits() -> bool:
                assert run.running["coordinator"].poll() is None, run.log("coordinator")
                return server_has_clients(server.url)

            until(waits, "the coordinator to ask Redis")
            assert terminate(run.running.pop("coordinator")) == 0, run.log("coordinator")
        finally:
            run.close()


def test_ctrl_c_while_it_waits_leaves_no_traceback(tmp_path: Path) -> None:
    """As from the terminal of somebody who starts one service by hand."""
    with start_valkey(tmp_path / "redis", "secret") as server:
        run = Processes.make(tmp_path, server)
        try:
            run.start("coordinator", "secret")
            process = run.running.pop("coordinator")
            until(lambda: process.poll() is not None or '"waiting"' in run.log("coordinator"), "it to wait")
            process.send_signal(signal.SIGINT)
            assert process.wait(15.0) == -signal.SIGINT, "a shell must see that it was interrupted"
            assert [json.loads(line)["event"] for line in run.log("coordinator").splitlines()] == ["waiting"]
        finally:
            run.close()


def server_has_clients(url: str) -> bool:
    """Others than the one that asks."""
    import redis

    with redis.Redis.from_url(url) as client:
        return len(client.client_list()) > 1
