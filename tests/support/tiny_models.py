"""Tiny models of real architectures, written to disk as users have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 96
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


_OTHERS: dict[str, Any] = {
    "qwen3-tied": (Qwen3Config, {"head_dim": 32}),
    "mistral": (MistralConfig, {"head_dim": 32, "sliding_window": None}),
    "gemma2-tied": (Gemma2Config, {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "phi3": (Phi3Config, {}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
}
"""Configuration class, and what it needs beside `_SMALL`."""


def build(kind: str, seed: int = 0) -> PreTrainedModel:
    """`kind`: llama, llama-tied, qwen2-tied, qwen3-moe or one of `_OTHERS`. Weights large enough to make
    log-probs differ."""
    torch.manual_seed(seed)
    small = dict(_SMALL, initializer_range=0.2, tie_word_embeddings=kind.endswith("-tied"))
    if kind.startswith("llama"):
        return LlamaForCausalLM(LlamaConfig(**small)).float()
    if kind.startswith("qwen2"):
        return Qwen2ForCausalLM(Qwen2Config(**small)).float()
    if kind == "qwen3-moe":
        more = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "norm_topk_prob": True,
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, **more)).float()
    configuration, more = _OTHERS[kind]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(configuration(**small, **more)).float()
    return model


def save(kind: str, directory: Path, seed: int = 0) -> PreTrainedModel:
    model = build(kind, seed)
    model.save_pretrained(directory)
    return model


def token_log_probs(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """log p(ids[i+1] | ids[:i+1]) for every i."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
