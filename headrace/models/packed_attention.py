"""Causal attention over a packed row: sequences laid end to end that do not see each other.

transformers calls the function registered here for every layer of a model whose attention implementation is
`PACKED`. The sequence boundaries arrive under the names that transformers uses for its flash kernels
(`cu_seq_lens_q`, ...), so a model that forwards its keyword arguments can use either. No mask is built for a
packed row: on CUDA no tensor grows with the square of the row's length.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

PACKED = "headrace_packed"
"""The attention implementation's name."""


def register() -> None:
    """Register `PACKED` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, H, T, D), key and value (1, H_kv, T, D) to (1, T, H, D), as transformers wants it.

    cu_seq_lens_q: (sequences + 1,) int32, 0 and the ends of the sequences; max_length_q: the longest. A
    query sees at most `sliding_window` keys, itself included.
    """
    name = type(module).__name__
    if others.get("s_aux") is not None or others.get("position_bias") is not None:
        raise ValueError(
            f"{name}: packed attention knows neither sinks nor position biases; train another model"
        )
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(f"{name} is not told where the sequences of a packed row begin")
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    if query.is_cuda and softcap is None and _kernel_takes(query, value):
        out = _by_kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)
    else:
        ends: list[int] = cu_seq_lens_q.tolist()
        parts = [
            _one_sequence(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scaling, window, softcap)
            for a, b in itertools.pairwise(ends)
        ]
        out = torch.cat(parts, dim=2).transpose(1, 2)
    return out, None


def _kernel_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Flash attention's limits: half precision, heads of one size, at most 256 and a multiple of 8."""
    size = query.shape[-1]
    return query.dtype.itemsize == 2 and size == value.shape[-1] and size <= 256 and size % 8 == 0


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out[None]


def _one_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    length = query.shape[2]
    if window is not None and window >= length:
        window = None
    if softcap is None:
        mask = None if window is None else _visible(length, window, query.device)
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    # No kernel caps scores, so compute the products one sequence at a time.
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(length, window or length, query.device), -torch.inf)
    wide = torch.promote_types(torch.float32, scores.dtype)
    return torch.softmax(scores, -1, dtype=wide).to(query.dtype) @ value


def _visible(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(length, length) of bool: the keys that each query sees."""
    distance = torch.arange(length, device=device)
    distance = distance[:, None] - distance[None, :]
    return (distance >= 0) & (distance < window)
