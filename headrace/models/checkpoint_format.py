"""Converts parameters in memory to tensors in checkpoint format (the names in safetensors files).

transformers keeps a layer's experts fused in memory; checkpoints and vLLM's loaders have one tensor
per expert and projection. Tied heads do not appear (`named_parameters` yields them once).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.models.files import tensor_shapes

if TYPE_CHECKING:
    import torch

_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"


def checkpoint_tensors(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that the parameter `name` of full `shape` becomes, in sending order."""
    if name.endswith(_GATE_UP):
        experts, double, hidden = shape
        stem = name.removesuffix("gate_up_proj")
        return [
            (f"{stem}{e}.{half}.weight", (double // 2, hidden))
            for e in range(experts)
            for half in ("gate_proj", "up_proj")
        ]
    if name.endswith(_DOWN):
        experts, hidden, inner = shape
        stem = name.removesuffix("down_proj")
        return [(f"{stem}{e}.down_proj.weight", (hidden, inner)) for e in range(experts)]
    return [(name, shape)]


def split_parameter(name: str, full: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of `checkpoint_tensors(name, full.shape)`, in the same order."""
    if name.endswith(_GATE_UP):
        half = full.shape[1] // 2
        return [part for expert in full for part in (expert[:half], expert[half:])]
    if name.endswith(_DOWN):
        return list(full)
    return [full]


def names_in_checkpoint(model_dir: Path) -> set[str]:
    """Tensor names in the safetensors files of a model directory (headers only). Raises ValueError."""
    return set(tensor_shapes(model_dir))


def check_names(model_dir: Path, names: Iterable[str]) -> None:
    """Raises ValueError when the names that would be sent are not the checkpoint's own.

    A mapping that is wrong for an architecture must stop the run instead of silently losing weights.
    """
    ours, theirs = set(names), names_in_checkpoint(model_dir)
    unknown = sorted(ours - theirs)
    missing = sorted(n for n in theirs - ours if not n.endswith(("lm_head.weight", "rotary_emb.inv_freq")))
    if unknown or missing:
        raise ValueError(
            f"{model_dir}: this architecture is not supported: its parameters and its checkpoint do not "
            f"match: not in the checkpoint {unknown[:5]}, not sent {missing[:5]}; it needs a mapping in "
            "headrace/models/checkpoint_format.py"
        )
