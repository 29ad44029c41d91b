"""Sizes from the files, and the estimate of memory against what torch really keeps."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config.gpu_arithmetic import Sharing
from headrace.config.run import RunConfig
from headrace.local.forecast import Forecast, Machines, forecast
from headrace.models.files import eos_token_ids, tensor_shapes, unsupported
from headrace.models.memory import (
    activation_bytes,
    engine_need,
    head_bytes,
    kv_token_bytes,
    layer_token_bytes,
    memory_problems,
    model_shape,
    rank_need,
)
from headrace.models.packed_model import install, pack
from headrace.models.token_scores import Question
from headrace_trainer.distributed.ranks import keep_to_share
from headrace_trainer.model.sharding import decoder_layers, recompute_in_backward
from tests.support import tiny_models

KINDS = ["llama", "llama-tied", "qwen2-tied", "qwen3-tied", "mistral", "gemma2-tied", "phi3", "qwen3-moe"]


def run_config(model: Path, **sections: Any) -> RunConfig:
    plain: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train_files": ["rows.jsonl"], "max_prompt_length": 1024, "max_response_length": 3072},
        "rollout": {"total_rollout_steps": 6400, "test_freq": 0, "replicas": 2},
        "actor": {"ppo_mini_batch_size": 32},
        "trainer": {"device": "cuda", "n_gpus_per_node": 6},
        "custom_reward_function": {"path": "reward.py"},
    }
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **values}
    return RunConfig.model_validate(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    model = tiny_models.save(kind, tmp_path)
    shape = model_shape(tmp_path)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.layers, shape.largest_layer, shape.in_layers) == (2, max(layers), sum(layers))
    attention = model.model.layers[0].self_attn
    if hasattr(attention, "q_proj"):
        sizes = (attention.q_proj.out_features, attention.k_proj.out_features)
        assert (shape.q_size, shape.kv_size) == sizes
    assert shape.tied == kind.endswith("-tied")
    if shape.tied:
        file = tmp_path / "config.json"
        settings = json.loads(file.read_text())
        settings.pop("tie_word_embeddings", None)
        file.write_text(json.dumps(settings))
        assert model_shape(tmp_path) == shape


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2-tied", "mistral", "phi3"])
def test_activations_are_about_what_the_backward_pass_keeps(
    kind: str, dtype: torch.dtype, recompute: bool, tmp_path: Path
) -> None:
    """The estimate is what is kept, within 5 % below and a quarter above."""
    model = tiny_models.save(kind, tmp_path).to(dtype).eval()
    shape = model_shape(tmp_path)
    install(model)
    if recompute:
        for layer in decoder_layers(model):
            recompute_in_backward(layer)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # holding it keeps its address its own
        return tensor

    def total() -> int:
        return sum(t.untyped_storage().nbytes() for t in kept.values())

    generator = torch.Generator().manual_seed(0)
    row = pack([torch.randint(0, 96, (n,), generator=generator) for n in (96, 100, 60)], torch.device("cpu"))
    tokens = row.input_ids.numel()
    where = torch.arange(tokens - 1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        hidden = row.states(model.model)[:-1]
        of_layers = total()
        model.lm_head(hidden, Question(where, where % 96, torch.ones(tokens - 1)))
    # What the layer at work needs beside the others' inputs is there in the backward pass alone.
    at_work = tokens * layer_token_bytes(shape, dtype.itemsize) if recompute else 0
    estimate = activation_bytes(shape, dtype.itemsize, tokens, recompute) - at_work
    print(f"{kind} {dtype}: kept {of_layers} bytes, estimated {estimate}")
    of_layers -= tokens * shape.hidden * (4 + dtype.itemsize)  # of the last norm
    assert of_layers <= 1.05 * estimate
    assert estimate <= 1.25 * of_layers
    assert total() - of_layers <= head_bytes(shape, dtype.itemsize, tokens)


def write_headers(directory: Path, shapes: dict[str, tuple[int, ...]], settings: dict[str, Any]) -> None:
    """A model directory whose weights file ends after its header: nobody reads further here."""
    header = {n: {"dtype": "BF16", "shape": list(s), "data_offsets": [0, 0]} for n, s in shapes.items()}
    raw = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    (directory / "config.json").write_text(json.dumps(settings))


@pytest.fixture
def seven_billion(tmp_path: Path) -> Path:
    """The shapes of Qwen2.5-7B: 7,615,616,512 parameters."""
    h, inner, kv, words = 3584, 18944, 512, 152064
    layer = {
        "self_attn.q_proj.weight": (h, h),
        "self_attn.q_proj.bias": (h,),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (h, h),
        "mlp.gate_proj.weight": (inner, h),
        "mlp.up_proj.weight": (inner, h),
        "mlp.down_proj.weight": (h, inner),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{n}.{name}": shape for n in range(28) for name, shape in layer.items()
    }
    shapes |= {
        "model.embed_tokens.weight": (words, h),
        "lm_head.weight": (words, h),
        "model.norm.weight": (h,),
    }
    settings = {
        "hidden_size": h,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "intermediate_size": inner,
        "vocab_size": words,
        "tie_word_embeddings": False,
    }
    write_headers(tmp_path, shapes, settings)
    return tmp_path


def test_a_model_of_seven_billion_parameters(seven_billion: Path) -> None:
    shape = model_shape(seven_billion)
    assert shape.parameters == 7_615_616_512
    assert kv_token_bytes(shape, 2) == 57_344
    c = run_config(seven_billion)
    need = rank_need(c, shape)
    states = sum(part.bytes for part in need.device if "float32" in part.name)
    assert states == pytest.approx(16 * shape.parameters / 6, rel=1e-6)
    assert need.device_bytes == sum(part.bytes for part in need.device)
    engine = engine_need(c, shape, 80 * 2**30)
    assert engine.weights == 2 * shape.parameters
    assert engine.kv_cache is not None
    assert engine.sequences == engine.kv_cache // (4096 * 57_344)
    assert 200 < engine.sequences < 300
    assert list(memory_problems(engine, c)) == []
    assert engine_need(c, shape, None).sequences is None


def test_more_ranks_need_less_each_and_a_critic_more(seven_billion: Path) -> None:
    shape = model_shape(seven_billion)
    needs = [
        rank_need(run_config(seven_billion, trainer={"n_gpus_per_node": n}), shape).device_bytes
        for n in (2, 4, 8)
    ]
    assert needs == sorted(needs, reverse=True)
    c = run_config(seven_billion)
    extra = rank_need(c, shape, critic=shape).device_bytes - rank_need(c, shape).device_bytes
    assert extra == 16 * shape.parameters // 6
    offloaded = run_config(seven_billion, actor={"use_kl_loss": True}, ref={"param_offload": True})
    assert (
        rank_need(offloaded, shape, reference=shape).device_bytes == rank_need(offloaded, shape).device_bytes
    )
    old = run_config(seven_billion, async_training={"use_rollout_log_probs": False})
    more = rank_need(old, shape).host_bytes - rank_need(c, shape).host_bytes
    assert more == 8 * shape.parameters // 6


def test_what_does_not_fit_is_told(seven_billion: Path) -> None:
    few = forecast(run_config(seven_billion, trainer={"n_gpus_per_node": 1}), Machines())
    assert any("more than 90 % of a GPU of 80 GiB: use more ranks" in text for text in few.warnings)
    small = forecast(run_config(seven_billion), Machines(gpu_gib=16))
    assert any("the GPU does not hold the KV cache of one sequence" in text for text in small.problems)
    odd = forecast(run_config(seven_billion, trainer={"n_gpus_per_node": 5}), Machines())
    assert any("does not divide by 5 trainer ranks" in text for text in odd.warnings)
    wide = run_config(seven_billion, rollout={"engine": {"tensor_parallel_size": 16}})
    assert any("an engine does not span nodes" in text for text in forecast(wide, Machines()).problems)
    on_cpu = run_config(
        seven_billion,
        trainer={"device": "cpu", "n_gpus_per_node": 1},
        rollout={"engine": {"kv_cache_memory_bytes": 1 << 20}},
    )
    found = forecast(on_cpu, Machines())
    assert any("kv_cache_memory_bytes = 1048576 does not hold one sequence" in t for t in found.problems)
    assert any("a run on this machine needs about" in text for text in found.warnings)


def test_gpus_that_trainer_and_engines_share(seven_billion: Path) -> None:
    """One node of 8: each has all of them, and the trainer what the engines leave of each."""

    def colocated(share: float) -> Forecast:
        c = run_config(
            seven_billion,
            trainer={"n_gpus_per_node": 8},
            rollout={"replicas": 8, "engine": {"gpu_memory_utilization": share}},
        )
        return forecast(RunConfig.model_validate(c.to_plain() | {"mode": "colocated_sync"}), Machines())

    found = colocated(0.35)
    assert found.facts["gpus"] == {
        "trainer": 8, "rollout": 8, "shared": True, "per_node": 8, "nodes": 1, "idle": 0,
    }  # fmt: skip
    assert any("8 GPUs for the trainer (1 x 8), 8 of the same for rollouters" in t for t in found.lines)
    needs = found.facts["memory"]["trainer_rank"]["device_bytes"]
    room = {share: 80 * 2**30 * (0.95 - share) for share in (0.35, 0.8)}
    assert room[0.8] < needs
    assert any("beside its engines (1 x 0.8): lower" in t for t in colocated(0.8).warnings)
    assert any("beside its engines" in t for t in found.warnings) == (needs > room[0.35])


def test_a_rank_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *a: told.append(a))
    keep_to_share(torch.device("cuda", 1), Sharing(engines=2, engine_share=0.25))
    assert told == [(pytest.approx(0.45), torch.device("cuda", 1))]


def test_a_recipe_of_one_node(seven_billion: Path) -> None:
    found = forecast(run_config(seven_billion, actor={"ppo_mini_batch_size": 30}), Machines())
    assert found.facts["gpus"] == {
        "trainer": 6, "rollout": 2, "shared": False, "per_node": 8, "nodes": 1, "idle": 0,
    }  # fmt: skip
    assert found.facts["batches"]["samples_per_rank"] == [5, 5]
    assert (
        "6 GPUs for the trainer (1 x 6), 2 for rollouters (2 x 1): 1 node of 8, 0 GPUs unused" in found.lines
    )
    assert math.isclose(found.facts["memory"]["parameters"], 7_615_616_512)


def test_what_the_nodes_hold(seven_billion: Path) -> None:
    """As many as are needed, fewer, and so few that nothing would train."""
    c = run_config(seven_billion, trainer={"n_gpus_per_node": 8}, rollout={"replicas": 12})
    needed = forecast(c, Machines())
    assert "2 nodes of 8 can hold the trainer and 8 rollouters: 4 of 12 stay pending" in needed.lines[-1]
    assert "nodes_given" not in needed.facts["gpus"]
    fits = forecast(c, Machines(nodes=3))
    assert fits.facts["gpus"] | {"nodes_given": 3, "rollouters_held": 16} == fits.facts["gpus"]
    assert not any("nodes of 8" in text for text in fits.warnings + fits.problems)
    some = forecast(c, Machines(nodes=2))
    assert any("use 3 nodes, or lower rollout.replicas" in text for text in some.warnings)
    none = forecast(c, Machines(nodes=1))
    assert any("no rollouter: nothing is generated; use 3 nodes" in text for text in none.problems)
    c = run_config(seven_billion, trainer={"nnodes": 2, "n_gpus_per_node": 8})
    assert any("cannot hold the trainer" in text for text in forecast(c, Machines(nodes=1)).problems)
    assert forecast(c, Machines(nodes=1)).facts["gpus"]["rollouters_held"] is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder model"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "takes images or sound"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is no causal language model"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(settings: dict[str, Any], told: str) -> None:
    found = unsupported(settings)
    assert found is not None
    assert re.search(told, found)


def test_models_that_can_be_are_not() -> None:
    own = {"architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}
    llama, gpt2 = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["GPT2LMHeadModel"]}
    for settings in ({}, llama, gpt2, own):
        assert unsupported(settings) is None


def test_end_tokens_come_from_the_generation_settings_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names an eos_token_id; add it"):
        eos_token_ids(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 3}}')
    assert eos_token_ids(tmp_path) == [3]
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert eos_token_ids(tmp_path) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert eos_token_ids(tmp_path) == [2, 5]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "holds no JSON object; download the model again"),
        ("{", "not readable as JSON"),
        ('{"eos_token_id": []}', r"eos_token_id is \[\]: make it the number"),
        ('{"eos_token_id": [null]}', r"eos_token_id is \[None\]: make it"),
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>': make it"),
    ],
)
def test_generation_settings_that_name_no_end(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"generation_config.json: {told}"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intermediate_size", [64, 128]), ("num_key_value_heads", [1, 2]), ("head_dim", "64"),
        ("num_attention_heads", -1),
    ],
)  # fmt: skip
def test_sizes_that_are_no_numbers_cost_only_the_estimate(seven_billion: Path, key: str, value: Any) -> None:
    """Whether such a model can be trained is said by the checks of the model."""
    file = seven_billion / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    (warning,) = [text for text in forecast(run_config(seven_billion), Machines()).warnings if key in text]
    assert warning.startswith("memory was not estimated: ")


def test_a_damaged_weights_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(ValueError, match=r"model\.safetensors: not readable as safetensors"):
        tensor_shapes(tmp_path)
