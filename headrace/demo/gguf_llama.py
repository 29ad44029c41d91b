"""A Llama in a GGUF file as a Hugging Face model directory, dequantised.

transformers reads GGUF too, but does not save what it has read, and builds a tokenizer that does not set
digits apart where the file asks for it (docs/decisions/libraries.md). What the formats do differently, and
this module undoes:

- GGUF names tensors `blk.3.attn_q.weight` where Hugging Face says `model.layers.3.self_attn.q_proj.weight`.
- GGUF turns rotary positions by pairs of neighbours, Hugging Face by halves: within each head the rows of q
  and k stand in another order.
- The tokenizer is a list of tokens and merges, from which a fast tokenizer is built.
- A file without `output.weight` has its output head tied to the embeddings.

Only byte-level BPE tokenizers are known (`gpt2` in the file). Needs the package gguf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedTokenizerFast

Array = npt.NDArray[np.float32]

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DERIVED = ("rope_freqs.weight",)
"""Tensors that follow from the configuration."""

_CONTROL_TOKEN = 3
"""Of `tokenizer.ggml.token_type`: a special token."""

_PRE_TOKENIZERS = ("smollm", "starcoder", "refact")
"""Those that set every digit apart and split the rest as GPT-2 does."""


class GgufError(ValueError):
    """The file is no Llama that this module knows."""


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """Every key of the file with its value."""
    return {name: field.contents() for name, field in reader.fields.items()}


def hugging_face_name(name: str) -> str:
    """Raises GgufError for a tensor that a Llama has not."""
    if name in _WHOLE:
        return _WHOLE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[3] == "weight":
        inner = _IN_LAYER.get(parts[2])
        if inner is not None:
            return f"model.layers.{parts[1]}.{inner}.weight"
    raise GgufError(f"the file has a tensor {name}, which no Llama has")


def halves_from_pairs(rows: Array, heads: int) -> Array:
    """Rows of q or k, (heads * size, hidden), from GGUF's order to that of Hugging Face.

    Within a head GGUF has (first half, second half) of the rotary dimensions interleaved.
    """
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def tensors(reader: GGUFReader) -> Iterator[tuple[str, Array]]:
    """(Hugging Face name, float32 values in Hugging Face's shape and order). Raises GgufError."""
    from gguf import dequantize

    metadata = read_metadata(reader)
    heads = int(_needed(metadata, "llama.attention.head_count"))
    kv_heads = int(metadata.get("llama.attention.head_count_kv", heads))
    for tensor in reader.tensors:
        if tensor.name in _DERIVED:
            continue
        name = hugging_face_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        if name.endswith("self_attn.q_proj.weight"):
            values = halves_from_pairs(values, heads)
        elif name.endswith("self_attn.k_proj.weight"):
            values = halves_from_pairs(values, kv_heads)
        yield name, values


def llama_config(metadata: Mapping[str, Any], tied: bool, dtype: str) -> LlamaConfig:
    """The model's configuration. `tied`: the output head is the embeddings. Raises GgufError."""
    from transformers import LlamaConfig

    architecture = _needed(metadata, "general.architecture")
    if architecture != "llama":
        raise GgufError(f"the file holds a model of architecture {architecture}, not llama")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise GgufError("the file scales rotary positions, which is not carried over")
    tokens = _needed(metadata, "tokenizer.ggml.tokens")
    heads = int(_needed(metadata, "llama.attention.head_count"))
    hidden = int(_needed(metadata, "llama.embedding_length"))
    return LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=int(_needed(metadata, "llama.feed_forward_length")),
        num_hidden_layers=int(_needed(metadata, "llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
        head_dim=int(metadata.get("llama.rope.dimension_count", hidden // heads)),
        max_position_embeddings=int(_needed(metadata, "llama.context_length")),
        rms_norm_eps=round(float(_needed(metadata, "llama.attention.layer_norm_rms_epsilon")), 9),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(metadata.get("llama.rope.freq_base", 1e4)),
        },
        tie_word_embeddings=tied,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=_needed(metadata, "tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        dtype=dtype,
    )


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """A fast tokenizer with the file's chat template. Raises GgufError."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, pre = _needed(metadata, "tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise GgufError(f"the file's tokenizer is {kind} with {pre}, which is not known here")
    tokens: list[str] = _needed(metadata, "tokenizer.ggml.tokens")
    types: list[int] = _needed(metadata, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _needed(metadata, "tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])

    def token(key: str) -> str | None:
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if number is None else tokens[int(number)]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=int(_needed(metadata, "llama.context_length")),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def convert(file: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Write the model in `file` to the directory `out`, weights in `dtype`. Raises GgufError."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(file)
    metadata = read_metadata(reader)
    wanted: torch.dtype = getattr(torch, dtype)
    state = {name: torch.from_numpy(np.array(values)).to(wanted) for name, values in tensors(reader)}
    config = llama_config(metadata, "lm_head.weight" not in state, dtype)
    config.architectures = ["LlamaForCausalLM"]
    build_tokenizer(metadata).save_pretrained(out)
    config.save_pretrained(out)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(out)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


def _needed(metadata: Mapping[str, Any], key: str) -> Any:
    if metadata.get(key) is None:
        raise GgufError(f"the file does not say {key}")
    return metadata[key]
