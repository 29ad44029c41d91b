"""What travels when weights travel: layout, checkpoint names, the snapshot under FSDP2."""

from __future__ import annotations

import math
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from headrace.models.checkpoint_format import (
    check_names,
    checkpoint_tensors,
    names_in_checkpoint,
    split_parameter,
)
from headrace.models.dtypes import ITEMSIZE
from headrace.weights.layout import TensorMeta, Unit, units_from_pb, units_to_pb, unpack
from headrace.weights.snapshot import Snapshot
from tests.process.weights.children import PATIENCE_S, Children

# Child processes import this module, so tiny_models (transformers: slow) is imported where it is used.

CPU = torch.device("cpu")

# ---- layout ----

metas = st.builds(
    TensorMeta,
    name=st.text("abc.", min_size=1, max_size=4),
    dtype=st.sampled_from(sorted(ITEMSIZE)),
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
)
units = st.lists(metas, max_size=6).map(lambda m: Unit(tuple(m)))


def content(unit: Unit, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(meta.shape, generator=generator).to(getattr(torch, meta.dtype)) for meta in unit.tensors
    ]


def pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    return torch.cat(raw) if raw else torch.zeros(0, dtype=torch.uint8)


@given(units, st.integers(0, 5), st.integers(0, 2**31))
def test_unpack_gives_back_what_was_packed_at_any_alignment(unit: Unit, offset: int, seed: int) -> None:
    """Tensors lie without padding: a float32 may begin at any multiple of 2, a buffer anywhere."""
    tensors = content(unit, seed)
    packed = pack(tensors)
    assert packed.numel() == unit.nbytes == sum(t.numel() * t.element_size() for t in tensors)
    buffer = torch.empty(unit.nbytes + offset, dtype=torch.uint8)[offset:]
    buffer.copy_(packed)
    found = list(unpack(buffer, unit))
    assert [name for name, _ in found] == [meta.name for meta in unit.tensors]
    for (_, tensor), expected in zip(found, tensors, strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.shape == expected.shape
        assert torch.equal(tensor, expected)


@given(st.lists(units, max_size=3))
def test_units_survive_protobuf_and_json(given_units: list[Unit]) -> None:
    message = units_to_pb(given_units)
    assert units_from_pb(message) == given_units
    assert [m.bytes for m in message] == [u.nbytes for u in given_units]
    assert [Unit.from_plain(u.to_plain()) for u in given_units] == given_units


def test_unpack_of_an_empty_tensor_at_an_odd_offset() -> None:
    unit = Unit((TensorMeta("a", "bfloat16", (1,)), TensorMeta("b", "float32", (0, 3))))
    assert [t.shape for _, t in unpack(torch.zeros(2, dtype=torch.uint8), unit)] == [(1,), (0, 3)]


def test_unpack_does_not_copy_what_is_aligned() -> None:
    unit = Unit((TensorMeta("a", "float32", (2,)),))
    buffer = torch.zeros(8, dtype=torch.uint8)
    ((_, tensor),) = unpack(buffer, unit)
    assert tensor.data_ptr() == buffer.data_ptr()


# ---- checkpoint format ----


@pytest.mark.parametrize(
    "kind",
    ["llama", "llama-tied", "qwen2-tied", "qwen3-tied", "mistral", "gemma2-tied", "phi3", "qwen3-moe"],
)
def test_parameters_become_what_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    """Names, shapes and values, tensor by tensor: for the MoE one per expert and projection."""
    from tests.support import tiny_models

    model = tiny_models.save(kind, tmp_path)
    written: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        written |= load_file(file)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        announced = checkpoint_tensors(name, tuple(parameter.shape))
        tensors = split_parameter(name, parameter.detach())
        assert [tuple(t.shape) for t in tensors] == [shape for _, shape in announced]
        for (full_name, _), tensor in zip(announced, tensors, strict=True):
            assert full_name not in found
            found[full_name] = tensor
    assert sorted(found) == sorted(written)
    assert all(torch.equal(found[name], written[name]) for name in found)
    if kind == "qwen3-moe":
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in found
    check_names(tmp_path, found)
    assert names_in_checkpoint(tmp_path) == set(written)


def test_names_that_do_not_match_stop_the_run(tmp_path: Path) -> None:
    from tests.support import tiny_models

    model = tiny_models.save("llama", tmp_path)
    names = [name for name, _ in model.named_parameters()]
    check_names(tmp_path, names)
    with pytest.raises(ValueError, match=r"not in the checkpoint \['extra.weight'\]"):
        check_names(tmp_path, [*names, "extra.weight"])
    with pytest.raises(ValueError, match=r"not sent \['model.norm.weight'\]"):
        check_names(tmp_path, [n for n in names if n != "model.norm.weight"])


def test_an_architecture_without_a_mapping_is_refused(tmp_path: Path) -> None:
    """Mixtral's experts have names of their own in the checkpoint."""
    from tests.support import tiny_models

    model = tiny_models.save("mixtral", tmp_path)
    parameters = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    names = [full for name, shape in parameters for full, _ in checkpoint_tensors(name, shape)]
    with pytest.raises(ValueError, match="this architecture is not supported"):
        check_names(tmp_path, names)


# ---- snapshot ----


def full_parameters(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        full = full.detach().clone()
        announced = checkpoint_tensors(name, tuple(full.shape))
        for (n, _), t in zip(announced, split_parameter(name, full.to(dtype)), strict=True):
            out[n] = t
    return out


def gathered(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for unit, packed in zip(snapshot.units, snapshot.gather(), strict=True):
        assert packed is not None
        assert packed.dtype == torch.uint8
        assert packed.numel() == unit.nbytes
        out |= dict(unpack(packed, unit))
    return out


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not bit by bit the same."""
    assert list(found) == list(expected)
    return [n for n in found if found[n].dtype != expected[n].dtype or not torch.equal(found[n], expected[n])]


class Uneven(torch.nn.Module):
    """Sizes that two ranks cannot share evenly, one row among them, and a buffer that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        for index, shape in enumerate([(5, 3), (1, 4), (7,), (2, 2, 2), (1,), (4, 1)]):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.randn(shape)))
        self.register_buffer("b", torch.ones(3))


def disturb(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_snapshot_of_one_rank(dtype: str, bucket_bytes: int) -> None:
    model = Uneven()
    snapshot = Snapshot(model, dtype, bucket_bytes, None)
    snapshot.write()
    assert differing(gathered(snapshot), full_parameters(model, getattr(torch, dtype))) == []
    assert snapshot.nbytes == sum(u.nbytes for u in snapshot.units)
    for unit in snapshot.units:
        assert unit.nbytes <= bucket_bytes or len(unit.tensors) == 1
    for one, two in zip(snapshot.units, snapshot.units[1:], strict=False):
        assert one.nbytes + two.tensors[0].nbytes > bucket_bytes, "the next tensor would have fitted"


def test_snapshot_changes_only_when_written() -> None:
    model = Uneven()
    snapshot = Snapshot(model, "float32", 64, None)
    snapshot.write()
    before = full_parameters(model, torch.float32)
    disturb(model)
    assert differing(gathered(snapshot), before) == []
    assert differing(gathered(snapshot), before) == [], "a retry reads the same"
    snapshot.write()
    assert differing(gathered(snapshot), full_parameters(model, torch.float32)) == []
    assert len(differing(gathered(snapshot), before)) == len(before)


def _snapshot_rank(rank: int, pipe: Connection, port: int) -> None:
    """Every case on this rank; rank 0 answers the names that are wrong in each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tests.support import tiny_models

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=PATIENCE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (2,))
    result: dict[str, Any] = {}
    for kind in ("uneven", "qwen3-moe"):
        for dtype in ("float32", "bfloat16"):
            model: torch.nn.Module = Uneven() if kind == "uneven" else tiny_models.build(kind)
            if kind == "qwen3-moe":
                for layer in model.model.layers:  # type: ignore[union-attr]
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            snapshot = Snapshot(model, dtype, 4096 if kind == "qwen3-moe" else 40, group)
            snapshot.write()
            expected = full_parameters(model, getattr(torch, dtype))
            disturb(model)
            if rank == 0:
                found = gathered(snapshot)
                result[f"{kind}-{dtype}"] = (differing(found, expected), len(found), len(snapshot.units))
            else:
                assert [p for p in snapshot.gather() if p is not None] == []
            snapshot.write()
            again = full_parameters(model, getattr(torch, dtype))
            if rank == 0:
                result[f"{kind}-{dtype}-again"] = (
                    differing(gathered(snapshot), again),
                    len(again),
                    len(snapshot.units),
                )
            else:
                list(snapshot.gather())
            local = sum(e.local_numel() for e in snapshot._entries)
            total = sum(math.prod(e.shape) for e in snapshot._entries)
            assert local < 0.75 * total, "each rank keeps its own shards only"
    pipe.send(("ok", result))
    dist.barrier()
    dist.destroy_process_group()


def test_snapshot_of_two_fsdp_ranks_gathers_the_full_parameters() -> None:
    """Uneven rows, single rows and fused experts, cast to the wire dtype; later changes do not show."""
    from headrace.connections.net import free_port

    with Children(_snapshot_rank, range(2), free_port()) as children:
        result = children.answer(0)
        children.answer(1)
    assert len(result) == 8
    for case, (wrong, tensors, unit_count) in result.items():
        assert wrong == [], case
        assert tensors >= unit_count > 1
