"""The policy model under FSDP2: loading, sharding, log-probs of given tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from headrace.config import RunConfig
from headrace_trainer.ranks import Ranks

_MIN_LAYER_NUMEL = 1_000_000
"""Smaller layers are gathered together with the root: a collective each would cost more than it saves."""


def load_policy(config: RunConfig, ranks: Ranks) -> torch.nn.Module:
    """The model with float32 master weights, sharded over all ranks; computes in `model.dtype`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    model = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
    )
    model.config.use_cache = False
    # Dropout would make the log-probs that engine and trainer are compared by, and every ratio, noisy.
    model.eval()
    model.to(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    compute: torch.dtype = getattr(torch, config.model.dtype)
    mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh}
    if compute is not torch.float32:
        options["mp_policy"] = mixed
    for layer in decoder_layers(model):
        if sum(p.numel() for p in layer.parameters()) >= _MIN_LAYER_NUMEL:
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that are sharded one by one: the largest module list of the model."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def export_model(config: RunConfig, state: dict[str, torch.Tensor], out: Path) -> None:
    """Write a Hugging Face model directory that transformers and vLLM load. `state`: full parameters."""
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    fresh = out.with_name(out.name + ".tmp")
    if fresh.exists():
        shutil.rmtree(fresh)
    source = Path(config.model.path)
    trust = config.model.trust_remote_code
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(source, trust_remote_code=trust), trust_remote_code=trust
        )
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    cast = {name: tensor.to(dtype) for name, tensor in state.items()}
    model.load_state_dict(cast, strict=False, assign=True)
    model.tie_weights()
    if (source / "generation_config.json").exists():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(source)
    model.save_pretrained(fresh)
    AutoTokenizer.from_pretrained(source, trust_remote_code=trust).save_pretrained(fresh)
    if out.exists():
        shutil.rmtree(out)
    fresh.rename(out)
