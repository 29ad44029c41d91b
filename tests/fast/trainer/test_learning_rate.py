"""The learning rate over a run: warm-up, then constant or falling towards its floor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from headrace.config.algorithm import OptimConfig
from headrace_trainer.model.optimize import learnable, rate_factor

SHAPES = ("constant", "linear", "cosine")


def optim(kind: str, **values: float) -> OptimConfig:
    return OptimConfig.model_validate({"lr": 0.5, "lr_scheduler_type": kind, **values})


@given(st.sampled_from(SHAPES), st.integers(0, 20), st.integers(1, 60), st.floats(0, 1))
def test_it_rises_then_never_rises_again_and_keeps_to_its_floor(
    kind: str, warm_up: int, total: int, floor: float
) -> None:
    o = optim(kind, lr_warmup_steps=warm_up, min_lr_ratio=floor)
    rates = [rate_factor(o, step, total) for step in range(total + 10)]
    rising, rest = rates[:warm_up], rates[warm_up:]
    assert rising == sorted(rising)
    assert rest == sorted(rest, reverse=True)
    assert all(floor - 1e-9 <= r <= 1 for r in rest)
    if kind != "constant" and total > warm_up:
        assert rates[total] == pytest.approx(floor)


def test_the_cosine_is_the_one_of_the_field() -> None:
    """After the warm-up, in which the first step of transformers' has no rate at all."""
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(sgd, 4, 20, min_lr_rate=0.1)
    o = optim("cosine", lr_warmup_steps=4, min_lr_ratio=0.1)
    (factor,) = theirs.lr_lambdas
    assert [rate_factor(o, s, 20) for s in range(4, 21)] == pytest.approx([factor(s) for s in range(4, 21)])


def test_the_optimizer_follows_it() -> None:
    model = torch.nn.Linear(2, 1)
    part = learnable(model, optim("linear", lr_warmup_steps=1), total_steps=5)
    seen = []
    for _ in range(5):
        seen.append(part.learning_rate)
        model(torch.ones(1, 2)).sum().backward()
        part.apply_gradients(1.0)
    assert seen == pytest.approx([0.5, 0.5, 0.375, 0.25, 0.125])
