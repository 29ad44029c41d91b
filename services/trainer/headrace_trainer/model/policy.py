"""The policy model: loading and export."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.config.run import RunConfig
from headrace.models.packed_model import install
from headrace.system import disk
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.sharded_loading import fill, without_weights
from headrace_trainer.model.sharding import shard


def load_policy(config: RunConfig, ranks: Ranks) -> torch.nn.Module:
    """The model with float32 master weights, sharded over all ranks; computes in `model.dtype`."""
    torch.manual_seed(config.seed)
    model = causal_lm(config, config.model.path, torch.float32)
    shard(model, config.model.dtype, ranks, recompute=recomputes(config, model))
    fill(model, Path(config.model.path), ranks.device)
    return model


def recomputes(config: RunConfig, model: torch.nn.Module) -> bool:
    """Whether the layers of `model` are recomputed in the backward pass."""
    return config.model.recomputes(sum(p.numel() for p in model.parameters()))


def causal_lm(config: RunConfig, path: str, dtype: torch.dtype) -> torch.nn.Module:
    """A language model without weights that reads packed rows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    heartbeat.beat(heartbeat.LONG_S)
    trust = config.model.trust_remote_code
    settings = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    with without_weights():
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            settings, dtype=dtype, trust_remote_code=trust
        )
    model.config.use_cache = False  # type: ignore[union-attr]
    install(model)
    return model


def export_model(config: RunConfig, state: dict[str, torch.Tensor], out: Path) -> None:
    """Write a Hugging Face model directory that transformers and vLLM load. `state`: full parameters."""
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    heartbeat.beat(heartbeat.LONG_S)
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
    try:
        with disk.writing(out, sum(t.numel() * t.element_size() for t in cast.values())):
            model.save_pretrained(fresh)
            AutoTokenizer.from_pretrained(source, trust_remote_code=trust).save_pretrained(fresh)
    except disk.DiskFull:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)
    fresh.rename(out)
