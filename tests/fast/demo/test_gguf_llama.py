"""A tiny Llama goes into a GGUF file and comes back: tensors, configuration, tokenizer, scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (requirements/smollm2.lock)")

from headrace.demo import gguf_llama  # noqa: E402
from headrace.demo.gguf_llama import GgufError  # noqa: E402
from tests.support.tiny_models import token_log_probs  # noqa: E402

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 64, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: special tokens, every byte, a few merged ones."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    merges = ["Ġ t", "h e", "Ġt he", "1 2"]
    return tokens + [merge.replace(" ", "") for merge in merges], merges


def tiny_llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()[0]),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).float().eval()


def pairs_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i of a head's first half, then row i of its second."""
    size = weight.shape[0] // heads
    order = [
        head * size + half * (size // 2) + i
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return weight[order]


def write_gguf(file: Path, model: Any, quantised: bool = False, **metadata: Any) -> None:
    """`quantised`: the layers' matrices as Q4_1, else float32."""
    writer = gguf.GGUFWriter(file, metadata.get("architecture", "llama"))
    tokens, merges = vocabulary()
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model(metadata.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if "self_attn.q_proj" in name:
            values = pairs_from_halves(values, HEADS)
        elif "self_attn.k_proj" in name:
            values = pairs_from_halves(values, KV_HEADS)
        told = gguf_name(name)
        if quantised and told.startswith("blk.") and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(told, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(told, values)
    if "extra" in metadata:
        writer.add_tensor(metadata["extra"], np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name.startswith("model.layers."):
        _, _, number, rest = name.split(".", 3)
        return f"blk.{number}.{NAMES[rest.removesuffix('.weight')]}.weight"
    return whole.get(name, "output.weight")


def loaded(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_that_comes_back_is_the_one_that_went_in(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(tied)
    write_gguf(tmp_path / "m.gguf", model)
    gguf_llama.convert(tmp_path / "m.gguf", tmp_path / "hf", "float32")
    back = loaded(tmp_path / "hf")
    assert back.config.tie_word_embeddings is tied
    ours, theirs = dict(back.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = [1, 40, 41, 9, 77, 12, 100, 2]
    assert token_log_probs(back, ids) == pytest.approx(token_log_probs(model, ids), abs=1e-6)
    assert (back.generation_config.eos_token_id, back.config.pad_token_id) == (2, 2)


@pytest.mark.parametrize("quantised", [False, True])
def test_transformers_reads_the_same_from_the_file(quantised: bool, tmp_path: Path) -> None:
    """Its own reader of GGUF, below the loading of models, which needs one more package."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = tiny_llama(tied=True)
    write_gguf(tmp_path / "m.gguf", model, quantised)
    gguf_llama.convert(tmp_path / "m.gguf", tmp_path / "hf", "float32")
    ours = loaded(tmp_path / "hf")
    read = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=ours)
    parameters = dict(ours.named_parameters())
    assert read["tensors"].keys() == parameters.keys()
    for name, values in read["tensors"].items():
        torch.testing.assert_close(values.float(), parameters[name].detach(), rtol=0, atol=1e-6)
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        assert read["config"][key] == pytest.approx(getattr(ours.config, key)), key


def test_quantised_weights_are_scale_times_number_plus_least(tmp_path: Path) -> None:
    """Q4_1 by its definition: blocks of 32 with a scale and a least value, both float16, and 4 bits each."""
    model = tiny_llama(tied=True)
    write_gguf(tmp_path / "m.gguf", model, quantised=True)
    gguf_llama.convert(tmp_path / "m.gguf", tmp_path / "hf", "float32")
    found = dict(loaded(tmp_path / "hf").named_parameters())
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_down.weight")
    blocks = np.asarray(tensor.data).reshape(HIDDEN, INNER // 32, 20)
    scale, least = (blocks[..., at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    low, high = blocks[..., 4:] & 15, blocks[..., 4:] >> 4
    numbers = np.concatenate([low, high], -1).astype(np.float32)
    expected = (scale * numbers + least).reshape(HIDDEN, INNER)
    weight = found["model.layers.1.mlp.down_proj.weight"].detach().numpy()
    np.testing.assert_allclose(weight, expected, atol=1e-6)
    original = dict(model.named_parameters())
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):  # q and k in their own order again
        full = f"model.layers.0.{name}.weight"
        assert (found[full] - original[full]).abs().max() < 0.1 < original[full].abs().max(), full


def test_the_tokenizer_and_its_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "m.gguf", tiny_llama(tied=True))
    gguf_llama.convert(tmp_path / "m.gguf", tmp_path / "hf", "float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.tokenize("in the 12") == ["i", "n", "Ġthe", "Ġ", "1", "2"], "digits stand alone"
    for text in ("in the 12th", "naïve → 中文\n\t ok ", "x<|im_end|>y"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"architecture": "falcon"}, "architecture falcon, not llama|does not say llama"),
        ({"tokenizer": "llama"}, "tokenizer is llama"),
        ({"extra": "blk.0.ffn_gate_exps.weight"}, "blk.0.ffn_gate_exps.weight, which no Llama has"),
    ],
)
def test_other_files_are_refused(metadata: dict[str, Any], told: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_llama(tied=True), **metadata)
    with pytest.raises(GgufError, match=told):
        gguf_llama.convert(tmp_path / "m.gguf", tmp_path / "hf")
