"""A model that is filled shard by shard is the one that transformers loads whole, bit for bit."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.config.run import RunConfig
from headrace.connections.net import free_port
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.policy import causal_lm
from headrace_trainer.model.sharded_loading import fill
from headrace_trainer.model.sharding import shard
from tests.process.weights.test_weights import Children
from tests.support import tiny_models
from tests.support.learners import config, with_model

KINDS = ("llama", "llama-tied", "qwen2-tied", "qwen3-moe", "gemma2-tied", "phi3")


def whole(directory: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def loaded(c: RunConfig, directory: Path, ranks: Ranks) -> torch.nn.Module:
    model = shard(causal_lm(c, str(directory), torch.float32), "float32", ranks)
    fill(model, directory, ranks.device)
    return model


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation fills. What is mapped from a file, and memory that
    nobody writes to, cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self._free: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if type(t) is torch.Tensor and not t.is_meta:
                where = t.untyped_storage().data_ptr()
                if func.overloadpacket in (torch.ops.aten.set_, torch.ops.aten.empty):
                    self._free.add(where)
                elif where not in self._free:
                    self.numel = max(self.numel, t.numel())
        return out


def _rank(rank: int, pipe: Connection, port: int, directories: dict[str, Path]) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2",
    }  # fmt: skip
    ranks = Ranks("cpu", 120.0)
    for kind, directory in directories.items():
        c = with_model(config(), str(directory))
        with Largest() as seen:
            model = loaded(c, directory, ranks)
        full = {n: p.full_tensor() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
        full.update(model.named_buffers())
        if rank:
            wanted = whole(directory)
            same = sorted(wanted) == sorted(full) and all(torch.equal(full[n], wanted[n]) for n in wanted)
            pipe.send(("ok", (kind, same, seen.numel)))
    ranks.close()


def test_two_ranks_hold_what_one_would_load(tmp_path: Path) -> None:
    """Parameters, tied ones and fused experts among them, and buffers; and neither rank had a tensor whole
    that is sharded."""
    directories = {kind: tmp_path / kind for kind in KINDS}
    models = {kind: tiny_models.save(kind, directory) for kind, directory in directories.items()}
    largest = {kind: max(p.numel() for p in model.parameters()) for kind, model in models.items()}
    with Children(_rank, range(2), free_port(), directories) as children:
        for _ in KINDS:
            kind, same, numel = children.answer(1)
            assert same, kind
            assert numel < largest[kind], f"{kind}: {numel} elements at once"


def test_weights_of_another_precision_become_float32(ranks: Ranks, tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    model = loaded(with_model(config(), str(tmp_path)), tmp_path, ranks)
    wanted = whole(tmp_path)
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter.full_tensor(), wanted[name])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda t: t.pop("model.norm.weight"), "no file has model.norm.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
            r"model.norm.weight has the shape \(65,\), and config.json makes it \(64,\)",
        ),
    ],
)
def test_files_that_do_not_fit_are_named(damage: Any, told: str, ranks: Ranks, tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=told):
        loaded(with_model(config(), str(tmp_path)), tmp_path, ranks)


@pytest.mark.parametrize("sharded", [False, True])
def test_files_of_an_earlier_save_are_left_alone(sharded: bool, ranks: Ranks, tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path / "old", seed=1)
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path / "new", max_shard_size="50KB" if sharded else "1GB")
    (tmp_path / "old" / "model.safetensors").rename(tmp_path / "new" / "zz-old.safetensors")
    found = loaded(with_model(config(), str(tmp_path / "new")), tmp_path / "new", ranks)
    wanted = whole(tmp_path / "new")
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter.full_tensor(), wanted[name]), name  # type: ignore[attr-defined]
