"""Optimizers by name; torch is imported when one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from headrace.plugins.registry import Registry

if TYPE_CHECKING:
    import torch

    from headrace.config_algorithm import OptimConfig


def adamw(parameters: Iterable[torch.nn.Parameter], settings: OptimConfig) -> torch.optim.Optimizer:
    """torch's AdamW, fused."""
    import torch

    return torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


OPTIMIZERS: Registry[Callable[[Iterable[torch.nn.Parameter], OptimConfig], torch.optim.Optimizer]]
OPTIMIZERS = Registry("optimizer", {"AdamW": adamw}, group="headrace.optimizers")
"""From parameters (shards of FSDP2: DTensors) and settings to an optimizer. A schedule sets `lr` of its
groups, and a checkpoint holds its state."""
