"""Memory that a model needs, before anything is loaded: sizes from the files, needs from the settings.

Sizes are exact: they come from the headers of the safetensors files. Needs are estimates; docs/models.md
gives the formulas and what they leave out. With P parameters, W ranks and b bytes per element of
`model.dtype`:

- a trainer rank holds its share of float32 master weights, gradients and AdamW's two moments (16 P / W), the
  parameters that FSDP has gathered at one moment (b x (root + two layers)), the float32 gradient of a layer,
  and what the backward pass of one micro-batch of `actor.ppo_max_token_len_per_gpu` tokens needs;
- also in host memory: the committed snapshot (b P / W);
- an engine holds b P / tensor_parallel_size per GPU, and its KV cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.config.run import RunConfig
from headrace.models.dtypes import ITEMSIZE
from headrace.models.files import read_settings, tensor_shapes, text_settings

RANK_PROCESS_BYTES = 600 * 10**6
"""A trainer rank before it loads a model: Python, torch, transformers, on the host."""
ENGINE_PROCESS_BYTES = 1300 * 10**6
"""An engine on the CPU backend before it loads a model, with kernels and buffers of its own."""
SERVICES_BYTES = 800 * 10**6
"""Queue service and coordinator together."""

CHUNK_ELEMENTS = 2**26
"""Logits that the language-model head makes at a time: 256 MiB in float32."""

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


@dataclass(frozen=True)
class ModelShape:
    """Properties of a causal language model that the estimate needs."""

    parameters: int
    largest_layer: int
    """Parameters of the largest decoder layer."""
    in_layers: int
    """Parameters of all decoder layers; the others belong to the root."""
    layers: int
    hidden: int
    intermediate: int
    """Of the feed-forward part; of all experts that one token passes through, in a mixture."""
    q_size: int
    """Query heads times their size."""
    kv_size: int
    """Key-value heads times their size."""
    vocabulary: int
    tied: bool

    @property
    def root(self) -> int:
        """Parameters outside the decoder layers: embeddings, output head, last norm."""
        return self.parameters - self.in_layers


def model_shape(model_dir: Path) -> ModelShape:
    """From config.json and the weights' headers. Raises ValueError, naming what is missing."""
    settings = text_settings(read_settings(model_dir))
    shapes = tensor_shapes(model_dir)
    if not shapes:
        raise ValueError(f"{model_dir}: no weights")
    # Families that tie by default need not say so in config.json; the files then have no head tensor either.
    tied = settings.get("tie_word_embeddings", not any(n.endswith("lm_head.weight") for n in shapes))
    kept = {n: math.prod(s) for n, s in shapes.items() if not (tied and n.endswith("lm_head.weight"))}
    in_layer: dict[int, int] = {}
    for name, count in kept.items():
        if (found := _LAYER.search(name)) is not None:
            number = int(found.group(1))
            in_layer[number] = in_layer.get(number, 0) + count

    def number_of(*keys: str) -> int | None:
        for key in keys:
            value = settings.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if value:  # such as a list with a number for each layer
                shown = str(value)[:60]
                raise ValueError(f"{model_dir}/config.json: {key} is {shown}, and not one number above 0")
        return None

    def required(*keys: str) -> int:
        if (value := number_of(*keys)) is None:
            raise ValueError(f"{model_dir}/config.json does not say {keys[0]}")
        return value

    hidden = required("hidden_size", "n_embd")
    heads = required("num_attention_heads", "n_head")
    size = number_of("head_dim") or hidden // heads
    inner = number_of("intermediate_size", "n_inner") or 4 * hidden
    experts, of_expert = number_of("num_experts_per_tok"), number_of("moe_intermediate_size")
    if experts and of_expert:
        inner = experts * of_expert
    return ModelShape(
        parameters=sum(kept.values()),
        largest_layer=max(in_layer.values(), default=0),
        in_layers=sum(in_layer.values()),
        layers=required("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=inner,
        q_size=heads * size,
        kv_size=(number_of("num_key_value_heads") or heads) * size,
        vocabulary=required("vocab_size"),
        tied=bool(tied),
    )


def layer_token_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes that one decoder layer keeps per token for the backward pass, without recomputation.

    Two norms keep their input in float32 and pass on the compute dtype; attention keeps q, k, v, their
    repetition over the query heads and its output twice; the gated feed-forward part its input and four
    vectors of its inner size.
    """
    norms = 2 * shape.hidden * (2 * 4 + itemsize)
    attention = itemsize * (5 * shape.q_size + 2 * shape.kv_size)
    return norms + attention + 4 * itemsize * shape.intermediate


def activation_bytes(shape: ModelShape, itemsize: int, tokens: int, recompute: bool) -> int:
    """Bytes that all decoder layers keep for a micro-batch. A recomputed layer keeps only its input; the
    needs of the layer being computed are added."""
    of_layer = tokens * layer_token_bytes(shape, itemsize)
    if recompute:
        return shape.layers * tokens * itemsize * shape.hidden + of_layer
    return shape.layers * of_layer


def head_bytes(shape: ModelShape, itemsize: int, tokens: int) -> int:
    """Bytes at the loss: a chunk of logits in the compute dtype and four float32 copies of it, the float32
    gradient of the head's weights, and the states that it reads with their gradient."""
    chunk = min(tokens * shape.vocabulary, max(CHUNK_ELEMENTS, shape.vocabulary))
    return (
        chunk * (itemsize + 4 * 4)
        + 4 * shape.vocabulary * shape.hidden
        + 2 * tokens * shape.hidden * itemsize
    )


def kv_token_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_size * itemsize


@dataclass(frozen=True)
class Part:
    """One line of an estimate."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Need:
    """What one process needs. `device` is GPU memory; on CPU everything is host memory."""

    device: tuple[Part, ...]
    host: tuple[Part, ...]

    @property
    def device_bytes(self) -> int:
        return sum(p.bytes for p in self.device)

    @property
    def host_bytes(self) -> int:
        return sum(p.bytes for p in self.host)


def rank_need(
    c: RunConfig, policy: ModelShape, critic: ModelShape | None = None, reference: ModelShape | None = None
) -> Need:
    """Memory of one trainer rank at the peak of an update."""
    b, ranks, p = ITEMSIZE[c.model.dtype], c.world_size, policy.parameters
    tokens = c.actor.ppo_max_token_len_per_gpu
    recompute = c.model.recomputes(p)
    device = [
        Part("master weights, float32", 4 * p // ranks),
        Part("gradients, float32", 4 * p // ranks),
        Part("AdamW moments, float32", 8 * p // ranks),
        Part("gathered parameters", _gathered(policy, b)),
        Part("gradient of a layer", 4 * max(policy.largest_layer, policy.root)),
        Part(
            f"activations of {tokens} tokens" + (", recomputed" if recompute else ""),
            activation_bytes(policy, b, tokens, recompute),
        ),
        Part("a chunk of logits, and the head's gradient", head_bytes(policy, b, tokens)),
    ]
    host = [Part("process", RANK_PROCESS_BYTES), Part("committed snapshot", b * p // ranks)]
    if c.recomputes_old:
        host.append(Part("weights of the window's start, twice", 2 * 4 * p // ranks))
    if critic is not None:
        device.append(Part("critic: weights, gradients, moments", 16 * critic.parameters // ranks))
    if reference is not None:
        shares = Part("reference", b * reference.parameters // ranks)
        (host if c.ref.param_offload else device).append(shares)
    return Need(tuple(device), tuple(host))


def _gathered(shape: ModelShape, itemsize: int) -> int:
    """Bytes of gathered parameters: the root throughout a step, the layer being computed and the next one."""
    return itemsize * (shape.root + 2 * shape.largest_layer)


@dataclass(frozen=True)
class EngineNeed:
    """One engine, per GPU of it; on CPU all of it is host memory."""

    weights: int
    kv_token: int
    """Bytes of KV cache per token, on one GPU."""
    kv_cache: int | None
    """Bytes set aside for it; None on a GPU of unknown size."""
    longest: int
    """Tokens of the longest sequence."""
    max_num_seqs: int

    @property
    def sequences(self) -> int | None:
        """Sequences of maximum length that fit at once; None when the cache's size is unknown."""
        return None if self.kv_cache is None else self.kv_cache // (self.kv_token * self.longest)


_ENGINE_WORK_SHARE = 0.05
"""Of a GPU: activations and graphs of the engine, roughly."""


def engine_need(c: RunConfig, shape: ModelShape, gpu_bytes: int | None) -> EngineNeed:
    """`gpu_bytes`: memory of one GPU; None when unknown, or on CPU."""
    e, b = c.rollout.engine, ITEMSIZE[c.model.dtype]
    weights = b * shape.parameters // e.tensor_parallel_size
    cache: int | None = e.kv_cache_memory_bytes
    if c.trainer.device == "cuda":
        cache = None
        if gpu_bytes is not None:
            cache = max(0, int(gpu_bytes * (e.gpu_memory_utilization - _ENGINE_WORK_SHARE)) - weights)
    return EngineNeed(
        weights=weights,
        kv_token=max(1, kv_token_bytes(shape, b) // e.tensor_parallel_size),
        kv_cache=cache,
        longest=c.longest_sequence,
        max_num_seqs=e.max_num_seqs,
    )


def engine_host_bytes(c: RunConfig, need: EngineNeed) -> int:
    """Memory of one rollouter's processes on the host."""
    if c.trainer.device == "cuda":
        return ENGINE_PROCESS_BYTES
    return ENGINE_PROCESS_BYTES + 2 * need.weights + (need.kv_cache or 0)  # weights are also kept packed


def memory_problems(need: EngineNeed, c: RunConfig) -> Iterator[str]:
    """Reasons why an engine cannot start."""
    if need.sequences == 0 and need.kv_cache is not None:
        one = need.kv_token * need.longest
        if c.trainer.device == "cuda":
            yield (
                f"rollout.engine: beside {gigabytes(need.weights)} of weights the GPU does not hold the KV "
                f"cache of one sequence of {need.longest} tokens ({gigabytes(one)}): raise "
                "rollout.engine.tensor_parallel_size or gpu_memory_utilization, or shorten the sequences"
            )
        else:
            yield (
                f"rollout.engine.kv_cache_memory_bytes = {need.kv_cache} does not hold one sequence of "
                f"{need.longest} tokens, which takes {one}: raise it to at least {one}"
            )


def gigabytes(count: int) -> str:
    """`1.23 GB` (10^9 bytes), or MB below one."""
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.0f} MB"
