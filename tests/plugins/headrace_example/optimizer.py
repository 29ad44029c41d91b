from collections.abc import Iterable

import torch

from headrace.config.algorithm import OptimConfig


def sgd(parameters: Iterable[torch.nn.Parameter], settings: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameters, lr=settings.lr, momentum=settings.betas[0], weight_decay=settings.weight_decay
    )
