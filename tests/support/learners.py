"""Configurations and one-off updates for tests of the trainer's algorithms."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from headrace.config.run import RunConfig
from headrace.wire.payloads import Sample
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.learner import Learned, Learner
from headrace_trainer.model.optimize import Learnable
from tests.process.trainer import test_gradient_equivalence as equivalence


def config(**sections: dict[str, Any]) -> RunConfig:
    plain = equivalence.config(equivalence.Case([])).model_dump()
    for name, values in sections.items():
        plain[name].update(values)
    plain["actor"]["optim"]["lr"] = 1e-3
    return RunConfig.model_validate(plain)


def with_model(config: RunConfig, model_dir: str) -> RunConfig:
    plain = config.model_dump()
    plain["model"]["path"] = model_dir
    return RunConfig.model_validate(plain)


def parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in module.parameters()]  # type: ignore[attr-defined]


def untimed(_: str) -> contextlib.AbstractContextManager[None]:
    """A phase of an update that nobody measures."""
    return contextlib.nullcontext()


def learn(
    config: RunConfig, ranks: Ranks, samples: list[Sample], model_dir: str, updates: int = 1
) -> tuple[Learned, float]:
    """Updates of one window from a fresh model; the last one's outcome, and how far the policy went."""
    learner = Learner(with_model(config, model_dir), ranks)
    before = parameters(learner.model)
    learner.begin_window()
    for done in range(updates):
        learned = learner.learn([samples], {"0": 0}, done, untimed)
        assert learned.stepped == 1, "something was not finite"
    moved = sum(float((p - q).abs().sum()) for p, q in zip(parameters(learner.model), before, strict=True))
    return learned, moved


def with_baseline(samples: list[Sample], reward: float) -> list[Sample]:
    return [dataclasses.replace(s, baseline_reward=reward) for s in samples]


def with_reward(t: Any, reward: float) -> Any:
    return type(t)(t.token_ids, t.log_probs, t.loss_mask, t.segments, t.temperature, t.finish_reason, reward)


NEEDS: dict[str, dict[str, dict[str, Any]]] = {
    "gae": {"critic": {"enable": True}},
    "tppo": {"critic": {"enable": True}},
    "optimal_token_baseline": {"async_training": {"use_rollout_log_probs": False}},
    "decoupled_ppo": {"async_training": {"use_rollout_log_probs": False}},
}
"""What an estimator or a loss asks for beside its name."""


def training(seed: int) -> Learnable:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    schedule.step()
    return Learnable(model, optimizer, schedule)
