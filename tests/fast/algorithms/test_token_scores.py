"""Scores of tokens made in chunks are those made from all logits at once: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.algorithms.log_probs import sum_pi_squared, token_log_probs
from headrace.models.packed_model import logit_transform
from headrace.models.token_scores import Question, score_tokens
from tests.support.largest_tensor import LargestTensor

N, D, V = 23, 8, 50


class Settings:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


TRANSFORMS = {
    "plain": Settings(),
    "capped": Settings(final_logit_softcapping=1.5),
    "scaled and capped": Settings(logit_scale=0.5, logits_scaling=0.2, final_logit_softcapping=2.0),
}


def parts(dtype: torch.dtype, count: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Question]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(count, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(0, V, (count,), generator=generator)
    temperature = 0.5 + torch.rand(count, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return hidden, weight, bias, Question(torch.arange(count), ids, temperature, True, True)


@pytest.mark.parametrize("chunk", [1, 7, N, 1000], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients(name: str, chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    transform = logit_transform(TRANSFORMS[name])
    hidden, weight, bias, question = parts(dtype)
    logits = transform(torch.nn.functional.linear(hidden, weight, bias))
    picked, entropy = token_log_probs(logits, question.token_ids, question.temperature)
    upstream = torch.linspace(-1, 1, N, dtype=dtype)
    wanted = torch.autograd.grad((upstream * (picked + 0.3 * entropy)).sum(), (hidden, weight, bias))

    found = score_tokens(hidden, weight, bias, transform, question, chunk_elements=chunk * V)
    torch.testing.assert_close(found.log_probs, picked, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.entropy, entropy, rtol=tolerance, atol=tolerance)
    squares = sum_pi_squared(logits, question.temperature)
    torch.testing.assert_close(found.sum_pi_squared, squares, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(
        (upstream * (found.log_probs + 0.3 * found.entropy)).sum(), (hidden, weight, bias)
    )
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_what_is_not_asked_for_is_not_there() -> None:
    hidden, weight, bias, full = parts(torch.float32)
    found = score_tokens(
        hidden,
        weight,
        bias,
        logit_transform(Settings()),
        Question(full.positions, full.token_ids, full.temperature),
    )
    assert not found.entropy.requires_grad
    assert found.sum_pi_squared.numel() == 0


def test_many_chunks_in_bfloat16_lose_no_gradient() -> None:
    """The weights' gradient is summed in float32: a thousand chunks come as close to the truth as one."""
    count = 4096
    hidden, weight, _, question = parts(torch.bfloat16, count)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]

    def gradient(h: torch.Tensor, w: torch.Tensor, rows: int) -> torch.Tensor:
        scores = score_tokens(h, w, None, logit_transform(Settings()), question, chunk_elements=rows * V)
        return torch.autograd.grad(scores.log_probs.sum(), w)[0].double()

    truth = gradient(exact[0], exact[1], count)
    errors = [float((gradient(hidden, weight, rows) - truth).norm() / truth.norm()) for rows in (count, 4)]
    print(f"relative error of the gradient: {errors[0]:.1e} in one piece, {errors[1]:.1e} in 1,024")
    assert errors[1] < 1.5 * errors[0]


def test_a_logit_of_minus_infinity_adds_nothing() -> None:
    hidden, weight, _, question = parts(torch.float32)
    bias = torch.zeros(V)
    bias[:5] = -torch.inf
    ids = question.token_ids.clamp(min=5)
    asked = Question(question.positions, ids, question.temperature, entropy_gradient=True)
    found = score_tokens(hidden, weight, bias, logit_transform(Settings()), asked)
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert torch.isfinite(found.entropy).all()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_what_the_loss_leaves_out_teaches_nothing_whatever_its_logits() -> None:
    hidden, weight, _, question = parts(torch.float32)
    broken = hidden.detach().clone()
    broken[3] = torch.nan
    broken.requires_grad_()
    found = score_tokens(broken, weight, None, logit_transform(Settings()), question)
    kept = torch.arange(N) != 3
    (found.log_probs[kept].sum() + found.entropy[kept].sum()).backward()
    assert broken.grad is not None
    assert not broken.grad[3].any()
    assert torch.isfinite(broken.grad).all()


def test_memory_does_not_grow_with_the_batch() -> None:
    """At a vocabulary of 152,064: the largest tensor that forward or backward makes holds one chunk."""
    words, chunk = 152_064, 16 * 152_064
    largest = []
    for count in (32, 96):
        hidden = torch.randn(count, D, requires_grad=True)
        weight = torch.randn(words, D, requires_grad=True)
        question = Question(torch.arange(count), torch.arange(count), torch.ones(count))
        with LargestTensor() as mode:
            scores = score_tokens(hidden, weight, None, logit_transform(Settings()), question, chunk)
            scores.log_probs.sum().backward()
        largest.append(mode.numel)
    print(f"largest tensor: {largest}, a chunk {chunk}, all logits {32 * words} and {96 * words}")
    assert largest[0] == largest[1] <= chunk


def test_the_head_is_computed_once_more_in_the_backward_pass_and_not_twice() -> None:
    hidden, weight, _, question = parts(torch.float32)
    asked = Question(question.positions, question.token_ids, question.temperature)
    with FlopCounterMode(display=False) as counter:
        scores = score_tokens(hidden, weight, None, logit_transform(Settings()), asked, chunk_elements=7 * V)
        scores.log_probs.sum().backward()
    assert counter.get_total_flops() == 4 * (2 * N * D * V), "forward twice, two products backward"
