"""A process group of one, in this process: the trainer's collectives without its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from headrace.connections.net import free_port
from headrace_trainer.distributed.ranks import Ranks


@contextmanager
def single_rank(timeout_s: float = 60.0) -> Iterator[Ranks]:
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with mock.patch.dict(os.environ, environment):
        ranks = Ranks("cpu", timeout_s)
        try:
            yield ranks
        finally:
            ranks.close()
