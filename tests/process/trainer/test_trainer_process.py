"""A trainer that waits for samples, as a process: its heartbeat, and a Redis password that is replaced."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.config.redis_url import build
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.local.valkey_server import ValkeyServer, start_valkey
from tests.support.no_rollouter import Processes
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OLD, NEW, THIRD = "the-old-word", "the-new-word", "the-third-word"
ALL = ("queue", "coordinator", "trainer")


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path / "redis", OLD) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, valkey: ValkeyServer) -> Iterator[Processes]:
    made = Processes.make(tmp_path, valkey)
    yield made
    made.close()


def rank_of(run: Processes) -> psutil.Process:
    launcher = psutil.Process(run.running["trainer"].pid)
    (torchrun,) = launcher.children()
    (found,) = torchrun.children()
    return found


def command(run: Processes, password: str, *words: str) -> None:
    with connect(build("127.0.0.1", run.redis_port, password)) as client:
        client.execute_command(*words)


def disconnect(run: Processes, password: str) -> None:
    """All clients: their next connection logs in anew."""
    command(run, password, "CLIENT", "KILL", "TYPE", "NORMAL")


def issued(run: Processes, password: str) -> int:
    with connect(build("127.0.0.1", run.redis_port, password)) as client:
        return SyncLedger(client, run.folder.name).run(ops.stats()).issued_total


def assert_ended_by_the_login(run: Processes, name: str) -> None:
    """With the code of what a person has to mend, a message that says what, and without noise."""
    assert run.exit_code(name) == 78, run.log(name)[-3000:]
    lines = run.log(name)[run.started_at[name] :].splitlines()
    told = [line for line in lines if "refuses the login" in line]
    assert 1 <= len(told) <= 2, lines[-20:]
    assert "HEADRACE_REDIS_PASSWORD" in told[0]
    events = [line for line in lines if line.startswith("{")]
    assert len(events) < 40, "it must not go on trying"
    assert [line for line in events if '"traceback"' in line] == []


def test_who_waits_lives_and_who_is_frozen_is_found(run: Processes) -> None:
    run.up(OLD, *ALL)
    until(lambda: "no rollouter takes part; waiting" in run.log("trainer"), "the trainer to wait")
    assert run.alive() == (0, "")
    assert {file.name for file in run.heartbeat.iterdir()} == {"launcher", "rank-0"}
    rank = rank_of(run)
    rank.send_signal(signal.SIGSTOP)
    try:
        said = until(lambda: run.alive(2.0)[1], "the probe to fail")
        assert "rank-0 (" in said
        assert "launcher" not in said
    finally:
        rank.send_signal(signal.SIGCONT)
    until(lambda: run.alive(2.0) == (0, ""), "the rank to go on")
    assert run.end("trainer") == 75
    assert "checkpoint saved" in run.log("trainer"), "a trainer that has started ends in order"
    assert {file.name for file in run.heartbeat.iterdir()} == {"launcher"}

    # One bit of what it saved flips: it does not start from that, says so and is not started again.
    (shard,) = run.folder.glob("checkpoints/step_*/*.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    run.start("trainer", OLD)
    assert run.exit_code("trainer") == 65, run.log("trainer")[-3000:]
    last = run.log("trainer").splitlines()[-1]
    assert f"{shard} is damaged" in last
    assert "no older checkpoint is usable" in last


def test_ranks_that_wait_and_are_told_to_stop_leave_a_log_that_can_be_read(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    """Before the trainer says that it is alone it has waited for ten seconds, its second rank for a word."""
    run = Processes.make(tmp_path, valkey, ranks=2)
    try:
        run.up(OLD, *ALL)
        until(lambda: "no rollouter takes part; waiting" in run.log("trainer"), "the trainer to wait")
        assert [run.end(name) for name in reversed(ALL)] == [75, 0, 0]
    finally:
        run.close()
    for name in ALL:
        log = run.log(name)
        assert not [line for line in log.splitlines() if line.startswith(("[W", "[rank"))], log
        assert "Traceback" not in log
        assert '"traceback"' not in log


def test_a_password_changes(run: Processes, tmp_path: Path, valkey: ValkeyServer) -> None:
    run.up(OLD, *ALL)
    trainer = run.running["trainer"]

    # Two passwords for a while: nobody is disturbed, whichever they have.
    command(run, OLD, "ACL", "SETUSER", "default", f">{NEW}")
    disconnect(run, OLD)
    assert run.end("queue") == 0
    run.up(NEW, "queue")
    assert trainer.poll() is None
    before = issued(run, NEW)

    # The old one goes: who still has it is told so and ends.
    command(run, NEW, "ACL", "SETUSER", "default", f"<{OLD}")
    disconnect(run, NEW)
    for name in ("coordinator", "trainer"):
        assert_ended_by_the_login(run, name)
    run.up(NEW, "coordinator", "trainer")
    assert run.running["queue"].poll() is None
    assert run.end("trainer") == 75

    # The server itself is restarted with another one, as when its Secret was changed.
    assert run.running["queue"].poll() is None
    valkey.stop()
    with start_valkey(tmp_path / "redis", THIRD, run.redis_port):
        for name in ("queue", "coordinator"):
            assert_ended_by_the_login(run, name)
        run.up(THIRD, "queue", "coordinator")
        assert issued(run, THIRD) >= before > 0
        assert run.balanced(THIRD)
        for name in ("queue", "coordinator"):
            assert run.end(name) == 0
    logs = "".join(run.log(name) for name in ALL)
    assert [word for word in (OLD, NEW, THIRD) if word in logs] == []
