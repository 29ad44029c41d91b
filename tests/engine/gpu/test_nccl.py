"""The NCCL communicator on real devices. Everything here ends by itself: each rank has a deadline."""

from __future__ import annotations

import importlib.util
import time
from multiprocessing.connection import Connection

import pytest
import torch

from headrace.weights.transports import Communicator, CommunicatorError, connect
from headrace.weights.transports.store import serve_store
from tests.process.weights.test_weights import Children

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES == 0, reason="no CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("nccl") is None, reason="nccl4py is missing (headrace[cuda])"
    ),
]

needs_two = pytest.mark.skipif(DEVICES < 2, reason=f"{DEVICES} CUDA devices, NCCL wants one per rank: 2")


def join(port: int, epoch: int, rank: int, world_size: int, timeout_s: float) -> Communicator:
    device = torch.device("cuda", rank)
    return connect("nccl", "127.0.0.1", port, epoch, rank, world_size, timeout_s, device)


def pattern(size: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(size, device=device) % 251).to(torch.uint8)


def test_a_group_of_one_keeps_its_bytes() -> None:
    store = serve_store("127.0.0.1")
    comm = join(store.port, 1, 0, 1, 60.0)
    buffer = pattern(1 << 20, torch.device("cuda", 0))
    comm.broadcast(buffer)
    assert torch.equal(buffer, pattern(1 << 20, buffer.device))
    comm.close()
    comm.close()
    with pytest.raises(CommunicatorError, match="closed"):
        comm.broadcast(buffer)


def test_many_epochs_of_a_group_of_one() -> None:
    """A communicator that is closed gives its memory back."""
    store = serve_store("127.0.0.1")
    buffer = pattern(1024, torch.device("cuda", 0))
    free = []
    for epoch in range(10):
        comm = join(store.port, epoch, 0, 1, 60.0)
        comm.broadcast(buffer)
        comm.close()
        free.append(torch.cuda.mem_get_info(0)[0])
    assert free[-1] >= free[2] - (64 << 20), f"free device memory: {free}"


def test_a_host_buffer_is_staged() -> None:
    store = serve_store("127.0.0.1")
    comm = join(store.port, 1, 0, 1, 60.0)
    buffer = pattern(1000, torch.device("cpu"))
    comm.broadcast(buffer)
    assert torch.equal(buffer, pattern(1000, buffer.device))
    comm.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_peer_ends_in_an_error_within_the_deadline(rank: int) -> None:
    """Rank 0 waits inside NCCL's initialisation, rank 1 at the store for rank 0's identifier."""
    store = serve_store("127.0.0.1")
    began = time.monotonic()
    with pytest.raises(CommunicatorError):
        connect("nccl", "127.0.0.1", store.port, 1, rank, 2, 5.0, torch.device("cuda", 0))
    assert time.monotonic() - began < 35.0
    again = join(store.port, 2, 0, 1, 60.0)  # the device is as good as before
    again.broadcast(pattern(16, torch.device("cuda", 0)))
    again.close()


def _rank(rank: int, pipe: Connection, port: int, story: str) -> None:
    comm = join(port, 1, rank, 2, 10.0 if story == "death" else 60.0)
    pipe.send(("ok", "joined"))
    if story == "death":
        if rank == 1:
            return  # its process ends without a word
        assert pipe.recv() == "go"
        began = time.monotonic()
        try:
            for _ in range(64):
                comm.broadcast(pattern(16 << 20, torch.device("cuda", 0)))
        except CommunicatorError:
            pipe.send(("ok", time.monotonic() - began))
        comm.close()
        return
    for place in ("cuda", "cpu"):
        device = torch.device(place, rank) if place == "cuda" else torch.device("cpu")
        expected = pattern((3 << 20) + 5, device)
        buffer = expected.clone() if rank == 0 else torch.zeros_like(expected)
        comm.broadcast(buffer)
        pipe.send(("ok", bool(torch.equal(buffer, expected))))
    comm.close()


@needs_two
def test_broadcast_between_two_devices() -> None:
    store = serve_store("127.0.0.1")
    with Children(_rank, range(2), store.port, "broadcast") as children:
        for rank in range(2):
            assert children.answer(rank) == "joined"
            assert children.answer(rank) is True
            assert children.answer(rank) is True


@needs_two
def test_a_dead_peer_ends_the_broadcast() -> None:
    store = serve_store("127.0.0.1")
    with Children(_rank, range(2), store.port, "death") as children:
        assert children.answer(1) == "joined"
        assert children.answer(0) == "joined"
        children.processes[1].join(60)
        children.tell(0, "go")
        assert children.answer(0) < 30.0
