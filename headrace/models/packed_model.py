"""A causal language model that reads packed rows and returns scores of tokens instead of logits.

`install` gives a transformers model a second call form, `model(row, question)`, next to its own. The
packed form goes through the same module tree, so FSDP, recomputation and parameter names are unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.models.packed_attention import PACKED, register
from headrace.models.token_scores import Question, TokenScores, Transform, score_tokens


@dataclass(frozen=True)
class PackedRow:
    """Sequences laid end to end. A container, so that FSDP leaves the integers alone."""

    input_ids: torch.Tensor
    """(1, T)"""
    position_ids: torch.Tensor
    """(1, T), from 0 in each sequence."""
    ends: torch.Tensor
    """(sequences + 1,) int32: 0, then the end of each sequence."""
    longest: int

    @property
    def no_mask(self) -> torch.Tensor:
        """A mask in its final form, which transformers passes on unchanged. Without one it would look for
        sequences in the positions, which waits for the device."""
        return self.input_ids.new_zeros(1, 1, 1, 1)

    def states(self, backbone: torch.nn.Module) -> torch.Tensor:
        """(T, D): the last hidden state at each position."""
        found: torch.Tensor = backbone(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            attention_mask=self.no_mask,
            use_cache=False,
            cu_seq_lens_q=self.ends,
            cu_seq_lens_k=self.ends,
            max_length_q=self.longest,
            max_length_k=self.longest,
        ).last_hidden_state
        return found[0]


def pack(sequences: Sequence[torch.Tensor], device: torch.device) -> PackedRow:
    """sequences: (t,) int64 each, at least one."""
    lengths = [len(s) for s in sequences]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ids = torch.cat(list(sequences))[None].to(device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    return PackedRow(ids, positions, ends.to(device), max(lengths))


def attend_packed(model: torch.nn.Module) -> None:
    """Let `model` (a causal language model or its backbone) attend within the sequences of a packed row.

    Raises ValueError, naming the obstacle, for a model whose layers carry information between tokens by other
    means than attention.
    """
    if (why := _obstacle(model)) is not None:
        raise ValueError(f"{type(model).__name__} cannot read packed rows: {why}; train another model")
    register()
    model.set_attn_implementation(PACKED)  # type: ignore[operator]


def _obstacle(model: Any) -> str | None:
    if model._is_stateful or not model._supports_attention_backend:
        return "its layers carry a state, or compute attention in a way of their own"
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of kind {', '.join(others)}"
    if getattr(model.config, "attention_chunk_size", None):
        return "its attention is in chunks"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        return "its attention has sinks"
    return None


def install(model: torch.nn.Module) -> None:
    """Add `model(row: PackedRow, question: Question) -> TokenScores` to a causal language model."""
    attend_packed(model)
    backbone: torch.nn.Module = model.base_model  # type: ignore[assignment]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(f"{type(model).__name__}: its output head is no linear layer; train another model")
    transform = logit_transform(model.config)

    def answer(self: torch.nn.Linear, hidden: torch.Tensor, question: Question) -> TokenScores:
        return score_tokens(hidden, self.weight, self.bias, transform, question)

    def forward(self: torch.nn.Module, row: PackedRow, question: Question) -> TokenScores:
        hidden = row.states(backbone)[question.positions]
        found: TokenScores = head(hidden, question)
        return found

    head.forward = types.MethodType(answer, head)  # type: ignore[method-assign]
    model.forward = types.MethodType(forward, model)


def logit_transform(settings: Any) -> Transform:
    """The transform that models of this configuration apply to the head's logits."""
    cap = getattr(settings, "final_logit_softcapping", None)
    factor = getattr(settings, "logit_scale", None)
    divisor = getattr(settings, "logits_scaling", None)

    def transform(logits: torch.Tensor) -> torch.Tensor:
        if factor is not None:
            logits = logits * factor
        if divisor is not None:
            logits = logits / divisor
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    return transform


class _Told(Exception):
    """Raised when attention receives the sequence boundaries."""


def _probe(
    module: torch.nn.Module, *args: Any, cu_seq_lens_q: torch.Tensor | None = None, **others: Any
) -> Any:
    if cu_seq_lens_q is not None:
        raise _Told


def check_reads_packed_rows(model: torch.nn.Module) -> None:
    """Raises ValueError unless `model`, whose parameters may be on the meta device, can read packed rows.
    Its output is not checked, and the model is unusable afterwards."""
    from transformers import AttentionInterface

    install(model)
    AttentionInterface.register("headrace_probe", _probe)
    model.set_attn_implementation("headrace_probe")  # type: ignore[operator]
    row = pack([torch.zeros(2, dtype=torch.int64)], next(model.parameters()).device)
    try:
        row.states(model.base_model)  # type: ignore[arg-type]
    except _Told:
        return
    except Exception as error:  # the model's own code may raise anything here
        raise ValueError(
            f"{type(model).__name__} cannot read packed rows: {error!r}; train another model"
        ) from error
    raise ValueError(f"{type(model).__name__} cannot read packed rows: its attention cannot be replaced")
