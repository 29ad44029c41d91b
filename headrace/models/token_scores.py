"""Log-probabilities of given tokens straight from hidden states, without the logits of a whole batch.

The logits of a micro-batch are its largest tensor by far: 0.6 MB a token in float32 at a vocabulary of
152,064, several times over with softmax and gradient. So the language-model head works in chunks: it makes
a chunk's logits, keeps one number per token, and makes them once more in the backward pass. That costs the
head's forward pass a second time, and memory for one chunk however long the batch is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headrace.algorithms.log_probs import sum_pi_squared, token_log_probs
from headrace.models.memory import CHUNK_ELEMENTS

Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Question:
    """A query about N positions of a row. FSDP casts and moves tensors among a model's arguments, but leaves
    those in here unchanged."""

    positions: torch.Tensor
    """(N,) in the row: the hidden state there predicts the token."""
    token_ids: torch.Tensor
    """(N,) tokens to be scored."""
    temperature: torch.Tensor
    """(N,) float, the one that sampled the token."""
    entropy_gradient: bool = False
    sum_pi_squared: bool = False


class TokenScores(NamedTuple):
    """Each (N,), in float32 or the dtype of more precise hidden states."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    """Has a gradient where the question asks for it."""
    sum_pi_squared: torch.Tensor
    """Sum over the vocabulary of squared probabilities; without elements unless asked for."""


def score_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transform: Transform,
    question: Question,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenScores:
    """hidden: (N, D) states that predict; weight: (V, D); bias: (V,); `transform`: what the model does to its
    logits, element by element."""
    rows = max(1, chunk_elements // weight.shape[0])
    made = _Scores.apply(hidden, weight, bias, transform, question, rows)  # type: ignore[no-untyped-call]
    return TokenScores(*made)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transform: Transform,
        question: Question,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(torch.float32, hidden.dtype)
        count = hidden.shape[0]
        log_probs, entropy = (hidden.new_empty(count, dtype=dtype) for _ in range(2))
        squares = hidden.new_empty(count if question.sum_pi_squared else 0, dtype=dtype)
        for at in range(0, count, rows):
            c = slice(at, at + rows)
            logits = transform(torch.nn.functional.linear(hidden[c], weight, bias))
            ids, temperature = question.token_ids[c], question.temperature[c]
            log_probs[c], entropy[c] = token_log_probs(logits, ids, temperature)
            if question.sum_pi_squared:
                squares[c] = sum_pi_squared(logits, temperature)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.transform, ctx.question, ctx.rows = transform, question, rows
        ctx.mark_non_differentiable(squares, *(() if question.entropy_gradient else (entropy,)))
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        question: Question = ctx.question
        wide = torch.promote_types(torch.float32, weight.dtype)
        grad_hidden = torch.empty_like(hidden)
        # Summed over many chunks: bfloat16, the weights' dtype, would lose the small terms.
        grad_weight = torch.zeros_like(weight, dtype=wide)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for at in range(0, hidden.shape[0], ctx.rows):
            c = slice(at, at + ctx.rows)
            raw = torch.nn.functional.linear(hidden[c], weight, bias).requires_grad_()
            with torch.enable_grad():
                found = token_log_probs(ctx.transform(raw), question.token_ids[c], question.temperature[c])
            asked = 2 if question.entropy_gradient else 1
            upstream = [g[c] for g in grads[:asked]]
            (grad_raw,) = torch.autograd.grad(found[:asked], raw, upstream)
            # A token that the loss leaves out has no gradient, even if its logits are not finite.
            unread = torch.stack([g == 0 for g in upstream]).all(0)
            grad_raw.masked_fill_(unread[:, None], 0.0)
            grad_hidden[c] = grad_raw @ weight
            grad_weight += grad_raw.T @ hidden[c]
            if grad_bias is not None:
                grad_bias += grad_raw.sum(0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None, None, None,
        )  # fmt: skip
