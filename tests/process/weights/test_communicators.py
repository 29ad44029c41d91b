"""What carries the weights: groups over Gloo, their store, and the version of NCCL."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.weights.transports import CommunicatorError, connect, library_version
from headrace.weights.transports.store import client_store, serve_store
from tests.listeners import answers, listeners, other_addresses
from tests.process.weights.children import PATIENCE_S, Children

CPU = torch.device("cpu")


def _peer(rank: int, pipe: Connection, port: int, world_size: int) -> None:
    """Obeys: ('join', epoch, timeout) | ('receive', size) | ('send', bytes) | 'close' | 'die'."""
    comm = None
    pipe.send(("ok", "up"))
    while True:
        command = pipe.recv()
        try:
            match command:
                case ("join", epoch, timeout_s):
                    comm = connect("gloo", "127.0.0.1", port, epoch, rank, world_size, timeout_s, CPU)
                    pipe.send(("ok", "joined"))
                case ("receive", size):
                    assert comm is not None
                    buffer = torch.zeros(size, dtype=torch.uint8)
                    comm.broadcast(buffer)
                    pipe.send(("ok", bytes(buffer.tolist())))
                case "close":
                    assert comm is not None
                    comm.close()
                    comm.close()
                    pipe.send(("ok", "closed"))
                case "die":
                    os._exit(0)
        except CommunicatorError as error:
            pipe.send(("ok", f"CommunicatorError: {error}"))


def test_the_store_is_where_it_was_told_to_be() -> None:
    """And on no other interface: whoever reaches it needs no credential."""
    before = listeners([os.getpid()])
    store = serve_store("127.0.0.1")
    (there,) = listeners([os.getpid()]) - before
    assert (there.address, there.port) == ("127.0.0.1", store.port)
    assert not [address for address in other_addresses() if answers(address, store.port)]
    del store
    assert listeners([os.getpid()]) == before


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_gloo_broadcast_many_epochs_dead_peer_and_no_leak() -> None:
    """One peer process for all of it: starting one costs seconds."""
    store = serve_store("127.0.0.1")
    with Children(_peer, range(1, 2), store.port, 2) as children:
        assert children.answer(1) == "up"

        def join(epoch: int, timeout_s: float) -> Any:
            children.tell(1, ("join", epoch, timeout_s))
            comm = connect("gloo", "127.0.0.1", store.port, epoch, 0, 2, timeout_s, CPU)
            assert children.answer(1) == "joined"
            return comm

        counts = []
        for epoch in range(30):
            comm = join(epoch, 60.0)
            assert (comm.rank, comm.world_size) == (0, 2)
            payload = torch.arange(1000 + epoch, dtype=torch.int64).to(torch.uint8)
            before = payload.clone()
            children.tell(1, ("receive", payload.numel()))
            comm.broadcast(payload)
            assert children.answer(1) == bytes(before.tolist())
            assert torch.equal(payload, before)
            children.tell(1, "close")
            comm.close()
            comm.close()
            assert children.answer(1) == "closed"
            with pytest.raises(CommunicatorError, match="closed"):
                comm.broadcast(payload)
            del comm
            counts.append(open_fds())
        assert counts[-1] <= counts[4] + 2, f"file descriptors over 30 epochs: {counts}"

        timeout_s = 5.0
        comm = join(100, timeout_s)
        children.tell(1, "die")
        children.processes[0].join(PATIENCE_S)
        big = torch.zeros(64 << 20, dtype=torch.uint8)  # more than sockets buffer
        began = time.monotonic()
        with pytest.raises(CommunicatorError, match="broadcast failed on rank 0"):
            comm.broadcast(big)
        assert time.monotonic() - began < timeout_s + 10.0
        comm.close()


def test_gloo_a_receiver_does_not_wait_for_a_silent_sender_for_ever() -> None:
    store = serve_store("127.0.0.1")
    with Children(_peer, range(1, 2), store.port, 2) as children:
        assert children.answer(1) == "up"
        children.tell(1, ("join", 1, 2.0))
        comm = connect("gloo", "127.0.0.1", store.port, 1, 0, 2, 2.0, CPU)
        assert children.answer(1) == "joined"
        children.tell(1, ("receive", 8))
        assert children.answer(1).startswith("CommunicatorError: broadcast failed on rank 1")
        comm.close()


def test_gloo_a_peer_that_never_comes_is_named_by_the_error() -> None:
    store = serve_store("127.0.0.1")
    began = time.monotonic()
    with pytest.raises(CommunicatorError, match="rank 0 of 2 did not meet its peers"):
        connect("gloo", "127.0.0.1", store.port, 1, 0, 2, 1.0, CPU)
    assert time.monotonic() - began < 30.0


def test_epochs_do_not_see_each_others_keys() -> None:
    store = serve_store("127.0.0.1")
    client_store("127.0.0.1", store.port, 1, 5.0).set("key", "old")
    other = client_store("127.0.0.1", store.port, 2, 5.0)
    assert not other.check(["key"])


def test_no_store_is_a_communicator_error() -> None:
    from headrace.connections.net import free_port

    with pytest.raises(CommunicatorError, match="no weight-group store at"):
        client_store("127.0.0.1", free_port(), 1, 0.5)


def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_version("gloo") == ""
    library: Any = SimpleNamespace(version="2.30.7")
    core: Any = SimpleNamespace(get_version=lambda: SimpleNamespace(nccl4py="0.6.0", libnccl=library))
    monkeypatch.setitem(sys.modules, "nccl", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    assert library_version("nccl") == "2.30.7"
    library = None
    with pytest.raises(CommunicatorError, match=r"no libnccl.so.2 .* nvidia-nccl-cu13"):
        library_version("nccl")


def test_nccl_without_its_bindings_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(CommunicatorError, match="nccl4py"):
        library_version("nccl")


def test_an_unknown_transport_is_refused() -> None:
    store = serve_store("127.0.0.1")
    with pytest.raises(CommunicatorError, match=r"unknown transport .* gloo"):
        connect("ucx", "127.0.0.1", store.port, 1, 0, 1, 5.0, CPU)


def test_a_group_of_one_broadcasts_to_nobody() -> None:
    store = serve_store("127.0.0.1")
    comm = connect("gloo", "127.0.0.1", store.port, 1, 0, 1, 5.0, CPU)
    buffer = torch.arange(16, dtype=torch.uint8)
    comm.broadcast(buffer)
    assert buffer.tolist() == list(range(16))
    comm.close()
