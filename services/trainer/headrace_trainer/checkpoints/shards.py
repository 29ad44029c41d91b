"""Model and optimizer state in files that execute no code: tensors as safetensors, the rest as JSON.

Each rank writes one file with its own shards and their place in the whole tensors, in the format that torch's
`HuggingFaceStorageReader` reads. Each rank reads only what overlaps its own shards, from any of the files. So
the number of ranks may change, no tensor is gathered, and ranks need not communicate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headrace.records.checkpoints import CheckpointError

Scalar = Any
"""None, bool, int, float, str, or a list of them."""


def file_name(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


# -- trees: dictionaries (and lists of dictionaries) of tensors and scalars --------------------------------


def flattened(tree: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
    """Tensors and scalars of `tree` by their path, `a.b.0.c`. Raises TypeError for any other leaf."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Scalar] = {}
    for path, leaf in _leaves(tree, ""):
        if path in tensors or path in scalars:
            raise TypeError(f"two values of the state are called {path}")
        if isinstance(leaf, torch.Tensor):
            tensors[path] = leaf
        else:
            scalars[path] = _scalar(path, leaf)
    return tensors, scalars


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if (children := _children(tree)) is None:
        yield path, tree
        return
    for key, child in children.items():
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def _children(tree: Any) -> Mapping[Any, Any] | None:
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, list) and any(isinstance(child, Mapping | torch.Tensor) for child in tree):
        return dict(enumerate(tree))
    return None


def _scalar(path: str, value: Any) -> Scalar:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_scalar(path, v) for v in value]
    raise TypeError(f"{path}: a checkpoint keeps no {type(value).__name__}")


def with_scalars(tree: Any, scalars: Mapping[str, Scalar], path: str = "") -> Any:
    """`tree` with the scalars of a checkpoint in place of its own; tensors stay.

    Raises CheckpointError when one is missing or has another type.
    """
    if (children := _children(tree)) is not None:
        found = {k: with_scalars(v, scalars, f"{path}.{k}" if path else str(k)) for k, v in children.items()}
        return found if isinstance(tree, Mapping) else list(found.values())
    if isinstance(tree, torch.Tensor):
        return tree
    if path not in scalars:
        raise CheckpointError(f"it has no {path}")
    value = scalars[path]
    return tuple(value) if isinstance(tree, tuple) else value


# -- files ---------------------------------------------------------------------------------------------


@dataclass
class Shard:
    """What one rank writes: tensors in host memory, each with its place in the whole tensor."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    offsets: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's part of `tensor`."""
        local, offsets = tensor, [0] * tensor.dim()
        if isinstance(tensor, DTensor):
            _, place = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            local, offsets = tensor.to_local(), list(place)
            if not local.numel():
                return  # there are more ranks than rows
        self.tensors[name] = local.detach().to("cpu", copy=True).contiguous()
        self.offsets[name] = offsets

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: Path) -> None:
        """Write to `path`; synced to disk on return. Raises OSError or SafetensorError."""
        places = {name: {"saved_offsets": offsets} for name, offsets in self.offsets.items()}
        save_file(self.tensors, path, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def own_shard(tensors: Mapping[str, torch.Tensor], is_first: bool) -> Shard:
    """What this rank writes of `tensors`. The first rank writes what several ranks hold identically."""
    shard = Shard()
    for name, tensor in tensors.items():
        if _is_first_holder(tensor, is_first):
            shard.add(name, tensor)
    return shard


def _is_first_holder(tensor: torch.Tensor, is_first: bool) -> bool:
    if not isinstance(tensor, DTensor):
        return is_first
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return not any(c for c, p in zip(place, tensor.placements, strict=True) if p.is_replicate())


class Reader:
    """Reads the tensors of a checkpoint whose files have been verified. Raises CheckpointError."""

    def __init__(self, checkpoint: Path, storage: StorageReader | None = None) -> None:
        """`storage`: reader for another format than the one above."""
        self._reader = storage or HuggingFaceStorageReader(str(checkpoint))
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:  # the reader may raise anything for a bad file
            raise CheckpointError(f"{checkpoint}: its tensors cannot be read: {error!r}") from error
        self._checkpoint = checkpoint

    def empty(self, prefix: str) -> dict[str, torch.Tensor]:
        """Empty whole tensors to load into, for all names that begin with `prefix`."""
        return {
            name: torch.empty(found.size, dtype=found.properties.dtype)
            for name, found in self._metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(found, TensorStorageMetadata)
        }

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load into `tensors`, sharded or whole, by name. Reads only this rank's part of them."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            plan = planner.finish_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        except Exception as error:  # such as a missing tensor or a wrong shape
            raise CheckpointError(f"{self._checkpoint} does not fit this run: {error}") from error
