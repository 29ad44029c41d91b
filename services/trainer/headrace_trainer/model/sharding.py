"""Models under FSDP2."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from headrace_trainer.distributed.ranks import Ranks

_MIN_LAYER_NUMEL = 1_000_000
"""Smaller layers are gathered together with the root: a collective each would cost more than it saves."""


def shard(
    model: torch.nn.Module, dtype: str, ranks: Ranks, offload: bool = False, recompute: bool = False
) -> torch.nn.Module:
    """Shard `model` over all ranks and let it compute in `dtype`. It may still be without weights.

    `offload` keeps the shards in host memory and brings each layer's to the device when it computes.
    `recompute` keeps only the input of each decoder layer for the backward pass.
    """
    # Dropout would add noise to every ratio and to the log-probs by which engine and trainer are compared.
    model.eval()
    compute: torch.dtype = getattr(torch, dtype)
    options: dict[str, Any] = {"mesh": init_device_mesh(ranks.device.type, (ranks.world_size,))}
    if compute is not torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    for layer in decoder_layers(model):
        if recompute:
            recompute_in_backward(layer)
        if sum(p.numel() for p in layer.parameters()) >= _MIN_LAYER_NUMEL:
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def recompute_in_backward(layer: torch.nn.Module) -> None:
    """Recompute `layer` in the backward pass. A model in `eval()` ignores transformers' own switch, and a
    wrapper would rename parameters."""
    layer.forward = functools.partial(
        checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
    )


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks to shard one by one: the largest module list of the model."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def reshard(model: torch.nn.Module) -> None:
    """Free the root's parameters, which FSDP leaves gathered after a forward without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
