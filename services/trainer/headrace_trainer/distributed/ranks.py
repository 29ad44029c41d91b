"""What the trainer's ranks exchange besides gradients: small signed JSON values, never pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.config.gpu_arithmetic import Sharing
from headrace.connections import variables
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.signatures import Signatures, forbid_objects


def keep_to_share(device: torch.device, shared: Sharing) -> None:
    """Limit this process to its share of a GPU that engines also use.
    Beyond the share the allocator first frees its cached memory, then fails here instead of in an engine.
    """
    torch.cuda.set_per_process_memory_fraction(shared.trainer_share, device)


_TURN = timedelta(seconds=5)


class Ranks:
    """The default process group, and a Gloo group of its own for control messages."""

    def __init__(self, device: str, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.device = (
            torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
        )
        if device == "cuda":
            torch.cuda.set_device(self.device)
        self._signatures = Signatures(variables.accepted_tokens(), os.environ.get("TORCHELASTIC_RUN_ID", ""))
        forbid_objects()
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        self.weights = dist.new_group(backend="gloo", timeout=timeout)
        """Only the weight servers use it."""
        self.saving = dist.new_group(backend="gloo", timeout=timeout)
        """Only the threads that write checkpoints use it."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """Rank 0's `value` on every rank. It must survive JSON."""
        raw = self._signatures.sign(json.dumps(value).encode()) if self.is_first else b""
        size = torch.tensor([len(raw)])
        _wait(dist.broadcast(size, 0, group=self.control, async_op=True))
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.is_first:
            buffer.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        _wait(dist.broadcast(buffer, 0, group=self.control, async_op=True))
        return json.loads(self._signatures.read(bytes(buffer.tolist()))) if not self.is_first else value

    def gather_all(self, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank, on every rank. It must survive JSON."""
        return self._gather(value, self.control, _wait)

    def gather_saved(self, value: Any) -> list[Any]:
        """As `gather_all`, for threads that write checkpoints. They do not beat on behalf of their ranks."""
        return self._gather(value, self.saving, lambda work: work.wait())

    def _gather(self, value: Any, group: Any, wait: Callable[[Any], object]) -> list[Any]:
        raw = self._signatures.sign(json.dumps(value).encode())
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(raw)
        wait(dist.all_reduce(sizes, group=group, async_op=True))
        width = int(sizes.max())
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        rows = [torch.empty(width, dtype=torch.uint8) for _ in range(self.world_size)]
        wait(dist.all_gather(rows, mine, group=group, async_op=True))
        told = [bytes(row[: int(n)].tolist()) for row, n in zip(rows, sizes, strict=True)]
        return [json.loads(self._signatures.read(one)) for one in told]

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's (B_r, T_r) tensor, in order of rank, padded with zeros to the widest T."""
        height, width = self.largest(rows.shape[0]), self.largest(rows.shape[1])
        mine = torch.zeros((height, width), dtype=rows.dtype)
        mine[: rows.shape[0], : rows.shape[1]] = rows
        heights = [int(n) for n in self.gather_all(rows.shape[0])]
        everybody = [torch.empty_like(mine) for _ in range(self.world_size)]
        _wait(dist.all_gather(everybody, mine, group=self.control, async_op=True))
        return [part[:count] for part, count in zip(everybody, heights, strict=True)]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over the ranks, in float64."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        _wait(dist.all_reduce(tensor, group=self.control, async_op=True))
        return [float(v) for v in tensor]

    def largest(self, value: int) -> int:
        tensor = torch.tensor([value])
        _wait(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True))
        return int(tensor)

    def meet(self) -> None:
        """Wait until every rank has arrived."""
        _wait(dist.barrier(group=self.control, async_op=True))

    def close(self) -> None:
        dist.destroy_process_group()


def _wait(work: Any) -> None:
    """Wait for a control collective. A rank that waits here beats; a rank that holds the others up does not.
    Raises what the collective raises, including the timeout of its group.
    """
    while True:
        heartbeat.beat()
        try:
            work.wait(_TURN)
            return
        except RuntimeError:
            if work.is_completed():  # the wait below then raises the collective's error, if any
                work.wait()
                return
