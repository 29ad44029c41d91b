"""A node's launcher: its stream outlives any error, and a stop reaches ranks that are just being started."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from headrace.config.run import RunConfig
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_coordinator.launches import IN_ORDER
from headrace_trainer.distributed import heartbeat
from headrace_trainer.launch import launcher, verdict
from headrace_trainer.launch.launch_stream import LaunchStream
from headrace_trainer.launch.launcher import EX_STOPPED, Launcher  # type: ignore[attr-defined]
from tests.fast.config.test_config import GOOD
from tests.waiting import until

CONFIG = RunConfig.model_validate(GOOD)


class Coordinator(sync_pb2_grpc.CoordinatorServicer):
    """Starts whoever says hello, and ends the stream with them."""

    def __init__(self) -> None:
        self.told: list[int] = []
        """How ranks ended."""

    def TrainerNode(self, reports: Iterator[pb.NodeReport], _: Any) -> Iterator[pb.NodeCommand]:
        hello = next(reports).hello
        yield pb.NodeCommand(start=pb.NodeStart(launch="L1", store=hello.store))
        if (report := next(reports, None)) is not None:
            self.told.append(report.ended.code)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def address(coordinator: Coordinator) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    sync_pb2_grpc.add_CoordinatorServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Its ranks do nothing, until they are told to stop."""
    monkeypatch.setattr(launcher, "_command", lambda *_: ["sleep", "600"])
    args = argparse.Namespace(node_name="", node_address="", stay=False)
    return Launcher(CONFIG, args, tmp_path, heartbeat.Launch(tmp_path / "heartbeat"))


def ranks(made: Launcher) -> int | None:
    """Of a launch of one node."""
    with launcher._store_socket("127.0.0.1") as store:
        return made._ranks(pb.NodeStart(launch="L1", store=launcher._address(store)), store, None)


@pytest.mark.parametrize(
    ("address", "users", "expected"),
    [
        ("127.0.0.1", "", "lo"),
        ("127.0.0.1", "eth7", "lo"),  # one node: nobody else is to be reached
        ("10.1.2.3", "", "eth0"),
        ("10.1.2.3", "eth7", "eth7"),
    ],
)
def test_gloo_listens_where_the_ranks_meet(
    made: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, users: str, expected: str
) -> None:
    """And not where the host's name leads."""
    monkeypatch.setattr(launcher, "interface_of", lambda a: {"127.0.0.1": "lo", "10.1.2.3": "eth0"}[a])
    monkeypatch.setattr(launcher, "_command", lambda *_: ["sh", "-c", f"env > {tmp_path}/env"])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # engines in this process have set it
    if users:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", users)
    with launcher._store_socket("127.0.0.1") as store:
        bound = SimpleNamespace(getsockname=lambda: (address, 1), fileno=store.fileno, close=store.close)
        made._ranks(pb.NodeStart(launch="L1", store="127.0.0.1:1"), bound, None)  # type: ignore[arg-type]
    assert f"GLOO_SOCKET_IFNAME={expected}" in (tmp_path / "env").read_text().splitlines()


def stopped_when(made: Launcher, is_time: Callable[[], bool]) -> threading.Thread:
    """SIGTERM for the launcher, as soon as `is_time`."""

    def stop() -> None:
        until(is_time, "the time to stop", 30.0)
        made._stop(signal.SIGTERM, None)

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


def test_a_stop_while_the_ranks_are_started_reaches_them(
    made: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / "L1" / "started").touch()
        made._stop(signal.SIGTERM, None)
        return real(*args, **kwargs)

    monkeypatch.setattr(launcher, "_command", lambda *_: ["true"])
    monkeypatch.setattr(launcher.subprocess, "Popen", popen)  # type: ignore[attr-defined]
    assert ranks(made) == 0
    assert (tmp_path / "L1" / "stop").exists()


def test_ranks_that_have_nothing_to_save_are_ended_at_once(made: Launcher) -> None:
    """They load a model, say, and would look at the stop only minutes later."""
    thread = stopped_when(made, lambda: made._child is not None)
    assert made.run() == EX_STOPPED
    thread.join(10.0)


def test_other_nodes_are_told_of_ranks_that_agreed_on_no_stop(
    made: Launcher, coordinator: Coordinator, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the code of an orderly stop they would wait for these ranks to the end of a deadline."""
    monkeypatch.setenv("HEADRACE_COORDINATOR", address)
    monkeypatch.setattr(made._config.trainer, "nnodes", 2)
    thread = stopped_when(made, lambda: made._child is not None)
    assert made.run() == EX_STOPPED
    thread.join(10.0)
    (code,) = coordinator.told
    assert code not in IN_ORDER


def test_ranks_that_save_are_not_ended_with_their_launch(
    made: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is told to stop at once, and a coordinator that ends loses sight of a node."""
    folder = tmp_path / "L1"
    verdict.leave(tmp_path, verdict.LaunchVerdict(EX_STOPPED))
    saving = f"cd {folder}; until [ -e stop ]; do sleep 0.1; done; sleep 1; touch saved; cp ../verdict.json ."
    monkeypatch.setattr(launcher, "_command", lambda *_: ["sh", "-c", saving])
    stream = LaunchStream.__new__(LaunchStream)  # without its thread
    stream._state, stream._over, stream._failure = threading.Condition(), None, None

    def stop() -> bool:
        (folder / launcher.STARTED).touch()
        made._stop(signal.SIGTERM, None)
        stream._over = "a node has been out of reach"
        return True

    thread = threading.Thread(target=lambda: until(lambda: made._child is not None and stop(), "ranks", 30.0))
    thread.start()
    with launcher._store_socket("127.0.0.1") as store:
        assert made._ranks(pb.NodeStart(launch="L1", store="127.0.0.1:1"), store, stream) == EX_STOPPED
    thread.join(10.0)
    assert (folder / "saved").exists()


def test_a_stop_before_anything_is_there_harms_nothing(tmp_path: Path) -> None:
    heart = heartbeat.Launch(tmp_path / "heartbeat")
    made = Launcher(CONFIG, argparse.Namespace(), tmp_path / "not-yet", heart)
    made._stop(signal.SIGTERM, None)
    made._stop(signal.SIGTERM, None)


def test_the_ranks_are_watched_while_they_are_there(made: Launcher, tmp_path: Path) -> None:
    beats = tmp_path / "heartbeat"
    seen: list[set[str]] = []

    def later() -> bool:
        """The launcher's own beat goes on beside them."""
        os.utime(beats / "launcher", (1.0, 1.0))
        until(lambda: (beats / "launcher").stat().st_mtime > 1.0, "the launcher's beat", 30.0)
        seen.append({file.name for file in beats.iterdir()})
        return True

    thread = stopped_when(made, lambda: made._child is not None and later())
    ranks(made)
    thread.join(10.0)
    assert seen == [{"launcher", "rank-0", "rank-1"}]
    assert {file.name for file in beats.iterdir()} == {"launcher"}


def test_a_launcher_that_waits_for_others_is_alive(tmp_path: Path) -> None:
    heartbeat.Launch(tmp_path)
    stream = LaunchStream.__new__(LaunchStream)  # without its thread
    stream._state, stream._launch, stream._failure = threading.Condition(), None, None
    os.utime(tmp_path / "launcher", (1.0, 1.0))
    assert stream.wait(lambda: heartbeat.age_s(tmp_path) < 50.0) is None
