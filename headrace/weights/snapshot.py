"""The committed snapshot: one rank's shards of one policy version, in host memory, in the wire dtype.

It changes only in `write`. Rounds, retries and late joiners read it and never the live
parameters. Shards are cast before they are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from headrace.models.checkpoint_format import checkpoint_tensors, split_parameter
from headrace.weights.layout import TensorMeta, Unit


@dataclass(frozen=True)
class Entry:
    """A parameter: its full shape, and how many rows of dim 0 each rank pads its shard to (0: replicated)."""

    name: str
    shape: tuple[int, ...]
    rows: int

    def local_numel(self) -> int:
        return self.rows * math.prod(self.shape[1:]) if self.rows else math.prod(self.shape)


class Snapshot:
    """One rank's part of the snapshot. `group`: a separate Gloo process group over all trainer ranks."""

    def __init__(
        self, model: torch.nn.Module, wire_dtype: str, bucket_bytes: int, group: dist.ProcessGroup | None
    ) -> None:
        self._model = model
        self._dtype: torch.dtype = getattr(torch, wire_dtype)
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._world = dist.get_world_size(group) if group is not None else 1
        pin = any(p.device.type == "cuda" for p in model.parameters())
        self._entries: list[Entry] = []
        self._buffers: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            rows = 0
            if isinstance(parameter, DTensor):
                if parameter.placements != (Shard(0),):
                    raise ValueError(
                        f"{name}: placement {parameter.placements} is not supported, only Shard(0)"
                    )
                rows = -(-parameter.shape[0] // self._world)
            entry = Entry(name, tuple(parameter.shape), rows)
            self._entries.append(entry)
            self._buffers[name] = torch.zeros(entry.local_numel(), dtype=self._dtype, pin_memory=pin)
        self._plan = list(self._units(wire_dtype, bucket_bytes))
        self.units = [unit for _, unit in self._plan]
        self.nbytes = sum(u.nbytes for u in self.units)

    def _units(self, wire_dtype: str, bucket_bytes: int) -> Iterator[tuple[list[Entry], Unit]]:
        """Pack consecutive parameters up to `bucket_bytes`, so that a layer's tensors stay together."""
        entries: list[Entry] = []
        metas: list[TensorMeta] = []
        size = 0
        for entry in self._entries:
            found = [TensorMeta(n, wire_dtype, s) for n, s in checkpoint_tensors(entry.name, entry.shape)]
            more = sum(m.nbytes for m in found)
            if entries and size + more > bucket_bytes:
                yield entries, Unit(tuple(metas))
                entries, metas, size = [], [], 0
            entries.append(entry)
            metas += found
            size += more
        if entries:
            yield entries, Unit(tuple(metas))

    def write(self) -> None:
        """Copy the live parameters of this rank. The caller ensures that no gather runs meanwhile."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                flat = local.detach().reshape(-1)
                self._buffers[name][: flat.numel()].copy_(flat)  # casts; the padding stays zero

    def gather(self) -> Iterator[torch.Tensor | None]:
        """Unit by unit, a collective of all ranks: packed bytes (1-d uint8) on rank 0, None elsewhere."""
        for entries, unit in self._plan:
            yield self._gather_unit(entries, unit)

    def _gather_unit(self, entries: list[Entry], unit: Unit) -> torch.Tensor | None:
        mine = torch.cat([self._buffers[e.name] for e in entries]).view(torch.uint8)
        everybody: list[torch.Tensor] = [mine]
        if self._group is not None and self._world > 1:
            everybody = [torch.empty_like(mine) for _ in range(self._world)] if self._rank == 0 else []
            dist.gather(mine, everybody or None, dst=0, group=self._group)
        if self._rank != 0:
            return None
        packed = torch.empty(unit.nbytes, dtype=torch.uint8)
        at = source = 0
        for entry in entries:
            width = entry.local_numel() * self._dtype.itemsize
            parts = [shard[source : source + width].view(self._dtype) for shard in everybody]
            source += width
            count = math.prod(entry.shape)
            full = (torch.cat(parts)[:count] if entry.rows else parts[0]).view(entry.shape)
            for tensor in split_parameter(entry.name, full):
                raw = tensor.contiguous().view(-1).view(torch.uint8)
                packed[at : at + raw.numel()].copy_(raw)
                at += raw.numel()
        return packed
