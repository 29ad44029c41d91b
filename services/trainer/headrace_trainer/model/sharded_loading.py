"""Loads a model that is never whole in one place: built without weights, sharded, then filled from files.

Each rank reads only its own rows of a tensor, so its memory peaks at its shard plus its part of one tensor. A
host with eight ranks reads each file's bytes once, thanks to the page cache.
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
    """Parameters created in this context have shapes but no memory. Buffers are real: modules that compute
    positions keep constants in them, and no file holds those."""
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

    `prefix`: prefix of the files' names that the model's names lack. `offload`: parameters stay in host
    memory, buffers do not. Raises ValueError, naming the tensor that is missing or has another shape.
    """
    allocate(model, device, torch.device("cpu") if offload else device)
    files = _Files(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            heartbeat.beat(heartbeat.LONG_S)
            _fill_parameter(f"{prefix}{name}", parameter, files)


def allocate(model: torch.nn.Module, device: torch.device, of_parameters: torch.device) -> None:
    """Allocate memory for what was built without weights, and move the rest to `device`."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied parameters would be untied
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
    # Experts that transformers keeps fused: each row is one or two tensors in the files.
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
