"""Services that are started before their Redis wait for it, say so once, and go on as the same processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.local.valkey_server import start_valkey
from tests.support.no_rollouter import READY, Processes
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORD = "the-word"
# The queue service last: what the others wait for next is the run, which it sets up.
ALL = ("trainer", "rollouter", "coordinator", "queue")
WAITS = '"for": "an answer of Redis at 127.0.0.1:'


def test_any_order(tmp_path: Path) -> None:
    with start_valkey(tmp_path / "redis", WORD) as server:
        run = Processes.make(tmp_path, server)
    try:
        for name in ALL:
            run.start(name, WORD)
        for name in ALL:
            until(lambda name=name: said(run, name, WAITS), f"{name} to wait; its log: {run.log(name)}")  # type: ignore[misc]
        with start_valkey(tmp_path / "redis", WORD, server.port):
            for name in ALL:
                until(lambda name=name: said(run, name, READY[name]), f"{name} to go on")  # type: ignore[misc]
                assert run.log(name).count(WAITS) == 1
            for name in ALL:
                assert run.end(name) in (0, 75), run.log(name)[-3000:]
    finally:
        run.close()


def said(run: Processes, name: str, what: str) -> bool:
    """By the process that was started."""
    assert run.running[name].poll() is None, run.log(name)[-4000:]
    return what in run.log(name)
