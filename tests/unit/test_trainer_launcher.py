"""A node's launcher: its stream outlives any error, and a stop reaches ranks that are just being started."""

from __future__ import annotations

import argparse
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import tls
from headrace.config import RunConfig
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_trainer import launch_stream, launcher
from headrace_trainer.launch_stream import LaunchStream
from headrace_trainer.launcher import Launcher
from tests.waiting import until

CONFIG = RunConfig.model_validate(
    {
        "name": "x",
        "model": {"path": "unused"},
        "data": {"train_files": ["unused"]},
        "rollout": {"n": 2, "total_rollout_steps": 8, "test_freq": 0},
        "actor": {"ppo_mini_batch_size": 2},
        "custom_reward_function": {"path": "unused"},
    }
)


class Coordinator(sync_pb2_grpc.CoordinatorServicer):
    """Starts whoever says hello, and ends the stream with them."""

    def TrainerNode(self, reports: Iterator[pb.NodeReport], _: Any) -> Iterator[pb.NodeCommand]:
        next(reports)
        yield pb.NodeCommand(start=pb.NodeStart(launch="L1"))
        next(reports, None)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    sync_pb2_grpc.add_CoordinatorServicer_to_server(Coordinator(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("error", [tls.TlsError("half of a replacement"), RuntimeError("whatever")])
def test_no_error_ends_the_stream(address: str, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Certificates that are just being replaced, say: the launcher would wait for ever."""
    errors, real = [error, error], tls.channel

    def channel(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(launch_stream.tls, "channel", channel)
    stream = LaunchStream(address, "", "node-a", 2)
    assert until(lambda: stream._launch or not stream._thread.is_alive(), "the launch", 15.0) == "L1"
    assert stream.wait(lambda: False) == "L1"
    stream.close()
    assert not stream._thread.is_alive()


def test_a_stop_while_the_ranks_are_started_reaches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Launcher(CONFIG, argparse.Namespace(), tmp_path)
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        made._stop(signal.SIGTERM, None)
        return real(*args, **kwargs)

    monkeypatch.setattr(launcher, "_command", lambda *_: ["true"])
    monkeypatch.setattr(launcher.subprocess, "Popen", popen)
    assert made._ranks("L1", None) == 0
    assert (tmp_path / "L1" / "stop").exists()


def test_a_stop_before_anything_is_there_harms_nothing(tmp_path: Path) -> None:
    made = Launcher(CONFIG, argparse.Namespace(), tmp_path / "not-yet")
    made._stop(signal.SIGTERM, None)
    made._stop(signal.SIGTERM, None)
