"""A rollouter's work on a real engine and a real ledger: drain, continuation elsewhere, failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect, connect_async
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, SyncLedger, adopt
from headrace.ledger.replies import Stats
from headrace.local.valkey_server import start_valkey
from headrace.wire.payloads import FinishReason, Prompt, decode_parked, decode_sample, encode_prompt
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter.generation.work import Worker
from headrace_rollouter.inference.engine import Engine
from tests.engine.weights.test_weight_transfer import run_config
from tests.in_process_reward import in_process
from tests.support import tiny_models

pytestmark = pytest.mark.slow

OWNERS = ["rollouter-0-a", "rollouter-1-b"]
RESPONSE = 64
EOS = 2


class Stack:
    def __init__(self, config: RunConfig, engine: Engine, ledger: AsyncLedger) -> None:
        self.config, self.engine, self.ledger = config, engine, ledger
        self.reward: Callable[..., Any] = lambda *_: 1.0

    def worker(self, owner: str) -> Worker:
        scorer = in_process(lambda *args: self.reward(*args))
        reader = SampleReader(self.config, tiny_models.VOCABULARY)
        worker = Worker(self.config, self.ledger, self.engine, scorer, lambda ids: str(ids), owner, reader)
        worker.resumed(0)
        worker.trusted.set()
        return worker

    async def stats(self) -> Stats:
        return await self.ledger.run(ops.stats())

    async def until(self, what: str, condition: Callable[[Stats], bool], seconds: float = 60.0) -> None:
        async def poll() -> None:
            while not condition(await self.stats()):
                await asyncio.sleep(0.01)

        try:
            await asyncio.wait_for(poll(), seconds)
        except TimeoutError:
            raise AssertionError(f"no {what} within {seconds:g} s: {await self.stats()}") from None


def tokens_generated() -> float:
    """vLLM's counter of generated tokens in this process."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:generation_tokens_total"
    )


def prompt(issue: int) -> bytes:
    ids = np.asarray([1, 5, 9 + issue], np.int32)
    return encode_prompt(Prompt(f"{issue:010d}", issue, 0, issue, ids, "test", "truth"))


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    tiny_models.save("llama", tmp_path / "model")
    config = run_config(tmp_path / "model", n=2, max_concurrent_samples=2)
    config.name = "worker"
    engine = await Engine.start(config, [EOS])
    with start_valkey(tmp_path / "redis", "secret") as server:
        sync = SyncLedger(connect(server.url), "worker")
        sync.run(ops.configure(8, 2, 0, 3, 4, "test"))
        sync.run(ops.issue(0, [prompt(i) for i in range(4)], True))
        term = sync.run(ops.open_term()).term
        lineage = sync.run(ops.open_lineage(0)).lineage
        adopt(sync, lineage, {})
        sync.run(ops.hold(term, 1, lineage))
        sync.run(ops.commit(term, 1, lineage, 0, "digest", OWNERS, False, False))
        ledger = AsyncLedger(connect_async(server.url), "worker")
        await engine.resume(0)
        try:
            yield Stack(config, engine, ledger)
        finally:
            await ledger.close()
            sync.close()
            engine.shutdown()


async def test_drained_work_is_continued_elsewhere_and_failures_end(stack: Stack) -> None:
    """One engine start for the whole life of samples: drain, continuation, a reward that raises."""
    before = tokens_generated()
    first = stack.worker(OWNERS[0])
    running = asyncio.create_task(first.run())
    await stack.until("two samples in flight", lambda s: s.counts["in_flight"] == 2)
    deadline = time.monotonic() + 30
    while tokens_generated() < before + 8:  # the engine's own count
        assert time.monotonic() < deadline
        await asyncio.sleep(0)
    await asyncio.wait_for(first.drain(), 30)
    await asyncio.wait_for(running, 5)
    after = await stack.stats()
    assert after.counts["in_flight"] == 0, "a drained rollouter owns nothing"
    assert after.counts["queued"] == 0, "the test wants them interrupted: make the responses longer"
    assert after.counts["parked"] + after.counts["ready"] == 4
    parked: dict[str, list[list[int]]] = {}
    taken = await stack.ledger.run(ops.take(OWNERS[0], 0, 4))
    for item in taken.items:
        if item.work is not None:
            group = decode_parked(item.work)
            parked[item.sample_id] = [t.token_ids.tolist() for t in group]
            assert any(0 < len(t.token_ids) < RESPONSE for t in group)
        op = (
            ops.park(OWNERS[0], item.sample_id, item.attempt, item.work, 0)
            if item.work is not None
            else ops.hand_back(OWNERS[0], item.sample_id, item.attempt)
        )
        assert await stack.ledger.run(op) == "ok"
    assert parked, "nothing was parked: the drain came before the first token"

    second = stack.worker(OWNERS[1])
    running = asyncio.create_task(second.run())
    await stack.until("four queued samples", lambda s: s.counts["queued"] == 4)
    second.draining = True
    await running
    ids = sorted(f"{i:010d}" for i in range(4))
    for sample_id, raw in zip(ids, await stack.ledger.run(ops.payloads(ids)), strict=True):
        assert raw is not None
        sample = decode_sample(raw.sample)
        assert sample.owner == OWNERS[1]
        for index, t in enumerate(sample.trajectories):
            tokens = t.token_ids.tolist()
            if t.finish_reason is FinishReason.STOP:
                assert tokens.index(EOS) == len(tokens) - 1, "a response that stops ends with its only EOS"
            else:
                assert len(tokens) == RESPONSE, "the limit holds over the whole"
                assert EOS not in tokens
            assert t.reward == 1.0
            assert [(s.version, s.start, s.end) for s in t.segments] == [(0, 0, len(tokens))]
            if sample_id in parked:
                head = parked[sample_id][index]
                assert t.token_ids[: len(head)].tolist() == head, "what was parked is kept"


async def test_a_reward_that_raises_sends_the_sample_to_the_dead(stack: Stack) -> None:
    def broken(*_: Any) -> float:
        raise RuntimeError("no such answer")

    stack.reward = broken
    worker = stack.worker(OWNERS[0])
    running = asyncio.create_task(worker.run())
    await stack.until("four dead samples", lambda s: s.counts["dead"] == 4)
    worker.draining = True
    await running
    dead = await stack.ledger.run(ops.dead())
    assert {d.reason for d in dead} == {"reward_error"}
    assert all("no such answer" in d.detail for d in dead)
