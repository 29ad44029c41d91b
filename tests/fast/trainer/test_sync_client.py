"""What the trainer hears of the coordinator before its first round."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from headrace.config.staleness import StalenessRule
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from headrace_trainer.sync import sync_client
from headrace_trainer.sync.sync_client import SyncClient

OF_THE_FILE = StalenessRule(
    sync_steps=4, require_batches=1, mini_batch=2, threshold=3.0, partial_rollout=True
)


class Coordinator(sync_pb2_grpc.CoordinatorServicer):
    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_answer = threading.Event()

    def Trainer(self, reports: Iterator[pb.TrainerReport], context: Any) -> Iterator[pb.TrainerCommand]:
        next(reports)
        self.asked.set()
        self.may_answer.wait(30)
        tuning = pb.Tuning(sync_steps=2, staleness_threshold=0.5)
        yield pb.TrainerCommand(welcome=pb.TrainerWelcome(committed_version=-1, tuning=tuning))
        for _ in reports:
            pass


@pytest.fixture
def coordinator() -> Iterator[tuple[Coordinator, str]]:
    server = grpc.server(ThreadPoolExecutor(4))
    found = Coordinator()
    sync_pb2_grpc.add_CoordinatorServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found, f"127.0.0.1:{port}"
    found.may_answer.set()
    server.stop(0).wait(10)


def client(address: str) -> SyncClient:
    nothing: Any = None
    return SyncClient(nothing, 1, "127.0.0.1", 1, address, "token", lambda _: None)


def test_the_gate_of_the_first_window_is_the_coordinators(coordinator: tuple[Coordinator, str]) -> None:
    """The file may have been changed to something that the coordinator has refused."""
    there, address = coordinator
    found = client(address)
    with ThreadPoolExecutor(1) as pool:
        wanted = pool.submit(found.tuning, OF_THE_FILE)
        assert there.asked.wait(30)
        assert not wanted.done()
        there.may_answer.set()
        assert wanted.result(30) == (2, 0.5)
    found.close()


def test_without_a_word_it_is_that_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_client, "_WELCOME_S", 0.05)
    found = client("127.0.0.1:1")
    assert found.tuning(OF_THE_FILE) == (4, 3.0)
    found.close()
