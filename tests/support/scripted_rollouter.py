"""The rollouter as a process around a scripted engine: `python -m tests.support.scripted_rollouter`.

Everything but the engine is real: membership, weight groups, work, the drain. It samples tokens evenly, a
few milliseconds each, and receives the trainer's weights only to tell their digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.config.run import RunConfig
from headrace.v1 import sync_pb2 as pb
from headrace.weights.layout import units_from_pb
from headrace.weights.transports import Communicator, connect
from headrace.wire.payloads import FinishReason, Segment, Trajectory, extend
from headrace_rollouter import __main__ as rollouter
from headrace_rollouter import service
from headrace_rollouter.inference.engine import Engine

T = TypeVar("T")
VOCABULARY = 96
TOKEN_S = 0.01
"""Seconds of work on one token."""


class ScriptedEngine(Engine):
    def __init__(self, config: RunConfig, llm: Any, stop_token_ids: list[int]) -> None:
        super().__init__(config, llm, stop_token_ids)
        self._version = -1
        self._going = asyncio.Event()
        self._comm: Communicator | None = None
        # Of its own, as an engine's core is: nobody waits at the end for one that waits for a trainer.
        self._thread = ThreadPoolExecutor(1)

    async def _exchange_in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @classmethod
    async def start(cls, config: RunConfig, stop_token_ids: list[int]) -> Engine:
        return cls(config, None, stop_token_ids)

    async def generate(self, prompt_ids: np.ndarray, head: Trajectory, seed: int | None) -> Trajectory:
        request, rng = uuid.uuid4().hex, random.Random(seed)
        limit = self._config.data.max_response_length
        ids: list[int] = []
        with self._running(request):
            while len(head.token_ids) + len(ids) < limit:
                await asyncio.sleep(TOKEN_S)
                await self._going_or_aborted(request)
                if request not in self._open:
                    break
                ids.append(rng.randrange(3, VOCABULARY))
        if not ids:
            return head
        whole = len(head.token_ids) + len(ids) == limit
        self.generated_tokens += len(ids)
        return extend(
            head,
            Trajectory(
                np.asarray(ids, np.int32),
                np.full(len(ids), -math.log(VOCABULARY), np.float32),
                np.ones(len(ids), np.uint8),
                [Segment(self._version, 0, len(ids))],
                head.temperature,
                FinishReason.LENGTH if whole else FinishReason.UNFINISHED,
            ),
        )

    async def _going_or_aborted(self, request: str) -> None:
        while request in self._open and not self._going.is_set():
            await asyncio.sleep(TOKEN_S)

    async def abort_all(self) -> None:
        self._open.clear()

    async def pause(self) -> None:
        self._going.clear()

    async def resume(self, version: int) -> None:
        self._version = version
        self._going.set()

    async def join_group(self, r: pb.Rendezvous, rank_offset: int) -> None:
        def join() -> Communicator:
            where = (r.transport, r.host, r.port, r.epoch, rank_offset, r.world_size, r.timeout_s)
            return connect(*where, torch.device("cpu"))

        if self._comm is not None:
            self._comm.close()
        self._comm = await self._exchange_in_thread(join)

    async def load(self, manifest: pb.Manifest) -> tuple[str, float]:
        comm, began = self._comm, time.monotonic()
        assert comm is not None
        assert not self._going.is_set(), "weights are loaded into an engine that is not paused"

        def receive() -> str:
            digest = hashlib.sha256()
            for unit in units_from_pb(manifest.units):
                packed = torch.empty(unit.nbytes, dtype=torch.uint8)
                for start in range(0, unit.nbytes, manifest.bucket_bytes):
                    comm.broadcast(packed[start : start + manifest.bucket_bytes])
                digest.update(packed.numpy().data)
            return digest.hexdigest()

        return await self._exchange_in_thread(receive), time.monotonic() - began

    async def canary(self, canary: pb.Canary) -> float:
        return 0.0

    async def watch(self) -> None:
        await asyncio.Event().wait()  # it has no core that could die

    async def check(self) -> None:
        pass

    def shutdown(self) -> None:
        pass  # the process ends


if __name__ == "__main__":
    service.start_engine = lambda config, stop_ids: ScriptedEngine.start(config, stop_ids)
    service._write_engine_file = lambda engine, name: None
    try:
        rollouter.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
