"""The optimizer of a policy or critic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.config.algorithm import OptimConfig
from headrace.plugins.optimizers import OPTIMIZERS


@dataclass
class Learnable:
    """A model with its optimizer and schedule; a checkpoint holds all three."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which losses are computed: float32, or that of a more precise model."""
        return torch.promote_types(torch.float32, next(self.model.parameters()).dtype)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def follow_configuration(self) -> None:
        """Apply the present configuration after loading a checkpoint: its rates and decays, but the
        checkpoint's step count."""
        assert isinstance(self.schedule, torch.optim.lr_scheduler.LambdaLR)
        now = {
            k: v for k, v in self.optimizer.defaults.items() if k in ("lr", "betas", "eps", "weight_decay")
        }
        factors = [f(self.schedule.last_epoch) for f in self.schedule.lr_lambdas]
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            group.update(now, initial_lr=now["lr"], lr=now["lr"] * factor)
        self.schedule.base_lrs = [now["lr"]] * len(factors)
        self.schedule._last_lr = [now["lr"] * factor for factor in factors]

    def apply_gradients(self, largest_norm: float) -> float:
        """Clip and step. Clears the gradients if no step is taken. All ranks together.

        Returns the norm before clipping. If it is not finite, no rank takes a step.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest_norm)
        total = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(total):
            self.optimizer.zero_grad(set_to_none=True)
            return total
        self.optimizer.step()
        self.schedule.step()
        return total


def learnable(model: torch.nn.Module, o: OptimConfig, total_steps: int) -> Learnable:
    """`model` under its optimizer, with a warm-up and a schedule over `total_steps` optimizer steps."""
    optimizer = OPTIMIZERS.get(o.optimizer)(model.parameters(), o)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(o, step, total_steps))
    return Learnable(model, optimizer, schedule)


def rate_factor(o: OptimConfig, step: int, total_steps: int) -> float:
    """Fraction of the learning rate in optimizer step `step`, counted from 0. The minimum is reached one step
    after the last."""
    if step < o.lr_warmup_steps:
        return (step + 1) / o.lr_warmup_steps
    if o.lr_scheduler_type == "constant":
        return 1.0
    done = min(1.0, (step - o.lr_warmup_steps) / max(1, total_steps - o.lr_warmup_steps))
    left = 1 - done if o.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
    return o.min_lr_ratio + (1 - o.min_lr_ratio) * left
