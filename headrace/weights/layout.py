"""Layout of a weight transfer: tensors in checkpoint format, packed into units.

Weights are gathered by unit: whole tensors, one after the other without padding, of at most `bucket_bytes`
in total (a larger tensor is a unit by itself). A unit is sent in slices of at most `bucket_bytes`. Both ends
derive everything from the same list of (name, dtype, shape).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.models.dtypes import ITEMSIZE
from headrace.v1 import sync_pb2 as pb

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorMeta:
    """Name in checkpoint format, wire dtype, full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Unit:
    tensors: tuple[TensorMeta, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def to_plain(self) -> list[list[Any]]:
        return [[t.name, t.dtype, list(t.shape)] for t in self.tensors]

    @classmethod
    def from_plain(cls, plain: Iterable[Any]) -> Unit:
        return cls(tuple(TensorMeta(str(n), str(d), tuple(int(x) for x in s)) for n, d, s in plain))


def units_to_pb(units: Iterable[Unit]) -> list[pb.TransferUnit]:
    return [
        pb.TransferUnit(
            tensors=[pb.TensorMeta(name=t.name, dtype=t.dtype, shape=t.shape) for t in u.tensors],
            bytes=u.nbytes,
        )
        for u in units
    ]


def units_from_pb(units: Iterable[pb.TransferUnit]) -> list[Unit]:
    return [Unit(tuple(TensorMeta(t.name, t.dtype, tuple(t.shape)) for t in u.tensors)) for u in units]


def unpack(packed: torch.Tensor, unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the unit's tensors in `packed` (1-d uint8, `unit.nbytes` long)."""
    import torch

    at = 0
    for meta in unit.tensors:
        raw = packed[at : at + meta.nbytes]
        at += meta.nbytes
        dtype = getattr(torch, meta.dtype)
        if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        yield meta.name, raw.view(dtype).view(meta.shape)
