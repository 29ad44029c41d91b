"""Optimizers by name. torch is imported only when one is created."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from headrace.plugins.registry import Registry

if TYPE_CHECKING:
    import torch


class OptimizerSettings(Protocol):
    """The fields of `actor.optim` and `critic.optim` that an optimizer may read."""

    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def adamw(parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
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


OPTIMIZERS: Registry[Callable[[Iterable[torch.nn.Parameter], OptimizerSettings], torch.optim.Optimizer]]
OPTIMIZERS = Registry("optimizer", {"AdamW": adamw}, group="headrace.optimizers")
"""Factories: (parameters, settings) -> optimizer. Parameters are FSDP2 shards (DTensors). The schedule sets
`lr` of the parameter groups, and checkpoints hold the optimizer's state."""
