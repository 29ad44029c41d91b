"""Ranks read objects of each other, and of nobody who has only taken a rank's place."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from headrace.weights.transports.store import serve_store
from headrace_trainer.distributed import ranks as ranks_module
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.distributed.signatures import Signatures, Unsigned, forbid_objects
from tests.process.weights.children import Children
from tests.single_rank import single_rank


class Attack:
    """Whoever unpickles it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _other_rank(rank: int, pipe: Connection, port: int, target: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.gather_object(Attack(target), dst=0)
    pipe.send(("ok", "done"))


@pytest.fixture
def torch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed_c10d, "_pickler", pickle.Pickler)
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("torch_as_it_is")
@pytest.mark.parametrize("forbidden", [True, False])
def test_a_stranger_in_a_ranks_place_runs_no_code(forbidden: bool, tmp_path: Path) -> None:
    """Not even where a library calls for objects; without the lock the attack is one."""
    target = tmp_path / "target"
    store = serve_store("127.0.0.1")
    with Children(_other_rank, range(1, 2), store.port, str(target)):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)
        mine, _ = distributed_c10d._object_to_tensor("mine", torch.device("cpu"), None)
        assert mine.numel()
        if forbidden:
            monkey = distributed_c10d._pickler
            forbid_objects()
            distributed_c10d._pickler = monkey  # so that it comes to reading
            with pytest.raises(Unsigned, match="send pickles"):
                dist.gather_object("mine", [None, None], dst=0)
        else:
            dist.gather_object("mine", [None, None], dst=0)
        assert target.exists() is not forbidden


def test_a_rank_makes_no_pickle() -> None:
    with single_rank(), pytest.raises(Unsigned, match="send pickles"):
        dist.all_gather_object([None], "mine")


@pytest.mark.parametrize("spoil", [lambda m: m[:-1], lambda m: m[1:], lambda m: m + b" ", lambda m: b""])
def test_a_message_is_read_whole_or_not_at_all(spoil: Callable[[bytes], bytes]) -> None:
    ours = Signatures(["word"], "launch")
    message = ours.sign(b'{"checkpoint": "step_1"}')
    assert ours.read(message) == b'{"checkpoint": "step_1"}'
    with pytest.raises(Unsigned):
        ours.read(spoil(message))


def test_a_rank_does_not_listen_to_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shared names, say, the checkpoint that all load."""
    monkeypatch.setenv("HEADRACE_TOKEN", "word")
    with single_rank() as ranks:
        assert ranks.gather_all("step_1") == ["step_1"]
        stranger = Signatures(["another"], "")
        monkeypatch.setattr(ranks._signatures, "sign", stranger.sign)
        with pytest.raises(Unsigned):
            ranks.gather_all("step_1")
        sent = iter([[len(message := stranger.sign(b'"/tmp/theirs"'))], list(message)])
        done = SimpleNamespace(wait=lambda _: None)
        broadcast = lambda tensor, *_, **__: (tensor.copy_(torch.tensor(next(sent))), done)[1]  # noqa: E731
        monkeypatch.setattr(ranks_module.dist, "broadcast", broadcast)  # type: ignore[attr-defined]
        monkeypatch.setattr(Ranks, "is_first", False)
        with pytest.raises(Unsigned):
            ranks.share(None)
