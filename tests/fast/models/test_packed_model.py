"""Sequences in one packed row score as each alone, in every family that is supported; others are refused."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.models.packed_attention import _kernel_takes, packed_attention
from headrace.models.packed_model import PackedRow, check_reads_packed_rows, install, pack
from headrace.models.token_scores import Question
from headrace_trainer.model.sharding import decoder_layers, recompute_in_backward
from tests.support.largest_tensor import LargestTensor
from tests.support.tiny_models import _SMALL

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}
CAPPED = GEMMA | {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3Config": {"head_dim": 32, "tie_word_embeddings": True},
    "MistralConfig": {"head_dim": 32, "sliding_window": 5},
    "Gemma2Config": CAPPED,
    "Gemma3TextConfig": GEMMA | WINDOWS,
    "Phi3Config": {},
    "Olmo2Config": {},
    "Glm4Config": {"head_dim": 32},
    "GraniteConfig": {"logits_scaling": 3.0, "attention_multiplier": 0.2},
    "CohereConfig": {"logit_scale": 0.5},
    "Qwen3MoeConfig": MOE | {"head_dim": 32, "norm_topk_prob": True},
    "MixtralConfig": {"num_local_experts": 4},
    "GPT2Config": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128},
}
LENGTHS = (17, 5, 2, 11)


def build(family: str, dtype: torch.dtype, **more: Any) -> Any:
    torch.manual_seed(0)
    settings = getattr(transformers, family)(
        **{**_SMALL, "initializer_range": 0.2, **FAMILIES.get(family, {}), **more}
    )
    # Capped scores are right in transformers' plain attention alone.
    plain = "eager" if family == "Gemma2Config" else None
    model = AutoModelForCausalLM.from_config(settings, attn_implementation=plain).to(dtype).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    return model


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (n,), generator=generator) for n in LENGTHS]


def ask(row: PackedRow) -> Question:
    """Every token but the first of each sequence."""
    ends = row.ends.tolist()
    where = torch.cat([torch.arange(a, b - 1) for a, b in itertools.pairwise(ends)])
    return Question(where, row.input_ids[0][where + 1], torch.ones(len(where), dtype=torch.float64))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_each_alone(family: str) -> None:
    """Log-probs and every parameter's gradient. Some families compute parts in float32 whatever the dtype."""
    model = build(family, torch.float64)
    alone = []
    for sequence in sequences():
        log_p = torch.log_softmax(model(input_ids=sequence[None]).logits[0, :-1], -1)
        alone.append(log_p.gather(-1, sequence[1:, None])[:, 0])
    wanted = torch.cat(alone)
    names, parameters = zip(*model.named_parameters(), strict=True)
    upstream = torch.linspace(-1, 1, len(wanted), dtype=torch.float64)
    grads = torch.autograd.grad((wanted * upstream).sum(), parameters, allow_unused=True)

    install(model)
    row = pack(sequences(), torch.device("cpu"))
    found = model(row, ask(row)).log_probs
    got = torch.autograd.grad((found * upstream).sum(), parameters, allow_unused=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9 if family != "Gemma2Config" else 2e-6)
    whole = torch.cat([g.flatten() for g in grads if g is not None]).norm()
    for name, ours, theirs in zip(names, got, grads, strict=True):
        if theirs is not None:
            assert float((ours - theirs).norm() / whole) < 1e-6, name


@pytest.mark.parametrize("family", ["LlamaConfig", "Gemma2Config"])
def test_sequences_do_not_see_each_other(family: str) -> None:
    """Other neighbours, another order: the same scores, to the last bit that float32 promises."""
    model = build(family, torch.float32)
    install(model)
    middle = sequences()[0]
    rows = [pack([middle, *others], torch.device("cpu")) for others in (sequences()[1:2], sequences()[2:])]
    first, second = (model(row, ask(row)).log_probs[: len(middle) - 1] for row in rows)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def measured(sizes: list[int], tensor: torch.Tensor) -> torch.Tensor:
    sizes.append(tensor.nbytes)
    return tensor


def test_layers_that_are_computed_again_give_the_same_gradients() -> None:
    row = pack(sequences(), torch.device("cpu"))
    grads, kept = [], []
    for again in (False, True):
        model = build("LlamaConfig", torch.float32)
        install(model)
        for layer in decoder_layers(model):
            if again:
                recompute_in_backward(layer)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(measured, saved), lambda t: t):
            scores = model(row, ask(row))
        scores.log_probs.sum().backward()
        grads.append([p.grad for p in model.parameters()])
        kept.append(sum(saved))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert kept[1] < 0.5 * kept[0], kept


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Llama4TextConfig": ({"num_local_experts": 2, "head_dim": 32}, "chunked_attention"),
    "GptOssConfig": ({"num_local_experts": 4, "head_dim": 32, "num_experts_per_tok": 2}, "sinks"),
    "MambaConfig": ({}, "carry a state"),
    "MiniMaxConfig": ({"num_local_experts": 2}, "linear_attention"),
    "NemotronConfig": ({}, "cannot read packed rows"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_packed_is_refused_before_anything_is_loaded(family: str) -> None:
    settings, reason = REFUSED[family]
    with torch.device("meta"):
        model = build(family, torch.float32, **settings)
    with pytest.raises(ValueError, match=reason):
        check_reads_packed_rows(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_packed_is_known_before_anything_is_loaded(family: str) -> None:
    with torch.device("meta"):
        model = build(family, torch.float32)
    check_reads_packed_rows(model)


def test_no_tensor_grows_with_the_square_of_a_row() -> None:
    """128 sequences of 16 tokens: the largest tensor of the attention is that of its inputs."""
    count, length, heads, size = 128, 16, 4, 8
    q, k, v = (torch.randn(1, heads, count * length, size) for _ in range(3))
    ends = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    with LargestTensor() as mode:
        packed_attention(
            torch.nn.Identity(), q, k, v, None, cu_seq_lens_q=ends, max_length_q=length, sliding_window=4
        )
    assert mode.numel == q.numel()


@pytest.mark.parametrize(
    ("dtype", "size", "of_values", "taken"),
    [
        (torch.bfloat16, 128, 128, True),
        (torch.float16, 64, 64, True),
        (torch.float32, 128, 128, False),
        (torch.bfloat16, 192, 128, False),  # multi-head latent attention
        (torch.bfloat16, 320, 320, False),
        (torch.bfloat16, 36, 36, False),
    ],
)
def test_what_the_kernel_does_not_take_goes_sequence_by_sequence(
    dtype: torch.dtype, size: int, of_values: int, taken: bool
) -> None:
    query, value = torch.empty(1, 2, 3, size, dtype=dtype), torch.empty(1, 2, 3, of_values, dtype=dtype)
    assert _kernel_takes(query, value) is taken
