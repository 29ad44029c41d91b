"""The policy at the start of the sync window, kept aside in host memory and swapped in to score.

It costs one copy of a rank's own shards in the master dtype. Afterwards the live parameters and the
optimizer's state are what they were, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from headrace_trainer.model.sharding import reshard


class WindowStart:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._kept: list[torch.Tensor] = []
        self._live: list[torch.Tensor] = []
        self.is_current = True
        """No optimizer step since `remember`: the live parameters are the ones kept."""

    def _locals(self) -> list[torch.Tensor]:
        return [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in self._model.parameters()]

    def remember(self) -> None:
        """Keep the live parameters, which open a new window."""
        self._copy(self._locals(), self._kept)
        self.is_current = True

    @staticmethod
    def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
        if not target:
            target.extend(torch.empty_like(t, device="cpu") for t in source)
        for into, tensor in zip(target, source, strict=True):
            into.copy_(tensor)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Make the model compute with the kept weights within the block, without gradient."""
        if not self._kept:
            raise RuntimeError("nothing was remembered: no window has begun")
        if self.is_current:
            with torch.no_grad():
                yield
            reshard(self._model)
            return
        self._copy(self._locals(), self._live)
        with torch.no_grad():
            self._copy_back(self._kept)
            try:
                yield
            finally:
                reshard(self._model)  # else the gathered copies of the other weights would be reused
                self._copy_back(self._live)

    def _copy_back(self, source: list[torch.Tensor]) -> None:
        for into, tensor in zip(self._locals(), source, strict=True):
            into.copy_(tensor)
