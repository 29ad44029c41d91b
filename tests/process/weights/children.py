"""Processes of a test that work as ranks."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

PATIENCE_S = 200.0
"""A child process that says nothing for so long has failed; it never takes so long."""


class Children:
    """Processes that each run `body(rank, pipe, *args)` and answer through a pipe."""

    def __init__(self, body: Callable[..., None], ranks: range, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], {}
        for rank in ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_guarded, args=(body, rank, theirs, *args), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes[rank] = ours

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(PATIENCE_S), f"rank {rank} did not answer within {PATIENCE_S:g} s"
        kind, value = self.pipes[rank].recv()
        assert kind == "ok", f"rank {rank}:\n{value}"
        return value

    def tell(self, rank: int, value: Any) -> None:
        self.pipes[rank].send(value)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _guarded(body: Callable[..., None], rank: int, pipe: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        body(rank, pipe, *args)
    except BaseException:  # goes through the pipe and fails the test there
        pipe.send(("error", traceback.format_exc()))
