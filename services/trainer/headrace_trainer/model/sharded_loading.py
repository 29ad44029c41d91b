"""A model that is never whole anywhere: built without weights, sharded, then filled from its files.

Each rank reads the rows of a tensor that belong to it, so its memory peaks at its own shard and one tensor's
part, and a host with eight ranks reads each file's bytes once, through the page cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headrace.models.checkpoint_format import checkpoint_tensors
from headrace.models.files import weight_files
from headrace_trainer.distributed import heartbeat


@contextmanager
def without_weights() -> Iterator[None]:
    """Parameters that are made in here have shapes and no memory. Buffers are real: what computes positions
    keeps its constants in some, and no file holds them."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def fill(
    model: torch.nn.Module, directory: Path, device: torch.device, *, prefix: str = "", offload: bool = False
) -> None:
    """Give a sharded `model` memory and the weights in the safetensors files of `directory`.

    `prefix`: what the files' names begin with and the model's do not; `offload`: parameters stay in host
    memory, buffers do not. Raises ValueError that names a tensor which is missing or of another shape.
    """
    allocate(model, device, torch.device("cpu") if offload else device)
    files = _Files(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            heartbeat.beat(heartbeat.LONG_S)
            _fill_parameter(f"{prefix}{name}", parameter, files)


def allocate(model: torch.nn.Module, device: torch.device, of_parameters: torch.device) -> None:
    """Memory for what was built without weights; the rest moves to `device`."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # or tied parameters would part
    try:
        model._apply(lambda t: torch.empty_like(t, device=of_parameters) if t.is_meta else t.to(device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _fill_parameter(name: str, parameter: torch.Tensor, files: _Files) -> None:
    local, first = parameter, 0
    if isinstance(parameter, DTensor):
        if parameter.placements != (Shard(0),):
            raise ValueError(f"{name}: placement {parameter.placements} is not supported, only Shard(0)")
        _, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        local, first = parameter.to_local(), offset[0]
    tensors = checkpoint_tensors(name, tuple(parameter.shape))
    files.check(tensors)
    if not local.numel():
        return
    if len(tensors) == 1:
        local.copy_(files.rows(name, first, first + len(local)))
        return
    # Experts that transformers keeps together: each of its rows is one or two tensors of the files.
    each = len(tensors) // len(parameter)
    for row in range(len(local)):
        begin = each * (first + row)
        parts = [files.whole(found) for found, _ in tensors[begin : begin + each]]
        local[row].copy_(torch.cat(parts))


class _Files:
    """The safetensors files of a model directory, opened once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._where: dict[str, Any] = {}
        for file in weight_files(directory):
            opened = safe_open(file, framework="pt")
            self._where.update(dict.fromkeys(opened.keys(), opened))

    def check(self, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
        for name, shape in tensors:
            if name not in self._where:
                raise ValueError(f"{self._directory}: no file has {name}; download the model again")
            found = tuple(self._slice(name).get_shape())
            if found != shape:
                raise ValueError(
                    f"{self._directory}: {name} has the shape {found}, and config.json makes it {shape}; "
                    "download the model again"
                )

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        part: torch.Tensor = self._slice(name)[begin:end]
        return part

    def whole(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._where[name].get_tensor(name)
        return found

    def _slice(self, name: str) -> Any:
        return self._where[name].get_slice(name)
