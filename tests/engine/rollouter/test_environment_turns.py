"""Turns on a real engine and a real ledger: interrupted anywhere, parked, and continued by another worker.

The interrupted trajectory must be the uninterrupted one: the same tokens under greedy decoding, the same
mask, turns and state, and log-probs that a plain model gives to the whole sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect, connect_async
from headrace.environments import Environment, Observation
from headrace.environments.host import EnvironmentHost
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, adopt
from headrace.ledger.client import SyncLedger as Ledger
from headrace.local.valkey_server import start_valkey
from headrace.wire.payloads import (
    FinishReason,
    Prompt,
    Segment,
    Trajectory,
    check_turns,
    decode_parked,
    decode_sample,
    encode_prompt,
)
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter.generation import samples
from headrace_rollouter.generation.environment_turns import EnvironmentTurns
from headrace_rollouter.generation.work import Worker
from headrace_rollouter.inference.engine import Engine
from tests.engine.weights.test_weight_transfer import run_config
from tests.in_process_reward import in_process
from tests.support import tiny_models
from tests.support.scripted_turns import Counting

pytestmark = pytest.mark.slow

OWNERS = ["rollouter-0-a", "rollouter-1-b"]
STOPS = [2, *range(75, 87)]
"""Many tokens end a turn of a model that knows nothing."""
PROMPT_IDS = [1, 5, 9]
TURNS = 4


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def encode(observation: Observation) -> list[int]:
    """Another token each time, or a greedy model would say the same again."""
    return [30 + int(word) % 7 + at for at, word in enumerate(observation.text.split())]


class CutEngine:
    """The real engine, interrupted when a response has `cut_at` tokens: the drain begins, as by SIGTERM."""

    def __init__(self, stack: Stack, cut_at: int) -> None:
        limited = stack.config.model_copy(deep=True)
        limited.data.max_response_length = max(cut_at, 1)
        self._limited = Engine(limited, stack.engine._llm, STOPS)
        self._cut_at = cut_at
        self.worker: Worker | None = None

    async def generate(self, prompt_ids: Any, head: Trajectory, seed: int | None) -> Trajectory:
        assert self.worker is not None
        t = head
        if len(head.token_ids) < self._cut_at:
            t = await self._limited.generate(prompt_ids, head, seed)
        if t.finish_reason is FinishReason.LENGTH or len(t.token_ids) >= self._cut_at:
            if t.finish_reason is not FinishReason.STOP:
                t.finish_reason = FinishReason.UNFINISHED
            self.worker.draining = True
        return t

    async def abort_all(self) -> None:
        pass


class Stack:
    def __init__(self, config: RunConfig, engine: Engine, ledger: AsyncLedger, sync: Ledger) -> None:
        self.config, self.engine, self.ledger, self._sync = config, engine, ledger, sync
        self._term = sync.run(ops.open_term()).term
        self._lineage = sync.run(ops.open_lineage(0)).lineage
        adopt(sync, self._lineage, {})
        self.version = -1
        self.issued = 0

    async def commit(self) -> None:
        """The next version, of the same weights."""
        self.version += 1
        self._sync.run(ops.hold(self._term, self.version + 1, self._lineage))
        args = (self._term, self.version + 1, self._lineage, self.version, "digest", OWNERS, False, False)
        assert self._sync.run(ops.commit(*args)).status == "ok"
        if self.version:
            await self.engine.pause()
        await self.engine.resume(self.version)

    def issue(self) -> str:
        sample_id = f"{self.issued:010d}"
        prompt = Prompt(sample_id, self.issued, 0, 0, np.asarray(PROMPT_IDS, np.int32), "test", "truth")
        self._sync.run(ops.issue(self.issued, [encode_prompt(prompt)], False))
        self.issued += 1
        return sample_id

    def worker(self, owner: str, environment: Environment, engine: Any = None) -> Worker:
        turns = EnvironmentTurns(EnvironmentHost(lambda: environment, 30.0), encode)
        scorer = in_process(lambda *_: 1.0)
        worker = Worker(
            self.config,
            self.ledger,
            engine or self.engine,
            scorer,
            decode,
            owner,
            SampleReader(self.config, tiny_models.VOCABULARY),
            environment=turns,
        )
        worker.resumed(self.version)
        worker.trusted.set()
        return worker

    async def parked(self, sample_id: str) -> Trajectory:
        """What lies parked; it is taken and given back."""
        owner = OWNERS[0]
        [item] = (await self.ledger.run(ops.take(owner, self.version, 1))).items
        assert item.sample_id == sample_id
        assert item.work is not None, "nothing was parked"
        [t] = decode_parked(item.work)
        oldest = min(s.version for s in t.segments)
        verdict = await self.ledger.run(ops.park(owner, sample_id, item.attempt, item.work, oldest))
        assert verdict == "ok"
        return t

    async def finished(self, worker: Worker, sample_id: str) -> Trajectory:
        """`worker` takes until the sample is queued."""
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(60):
            while (raw := (await self.ledger.run(ops.payloads([sample_id])))[0]) is None:
                await asyncio.sleep(0.005)
                assert not running.done(), running.exception()
        worker.draining = True
        await asyncio.wait_for(running, 10)
        [t] = decode_sample(raw.sample).trajectories
        return t


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    tiny_models.save("llama", tmp_path / "model")
    config = run_config(tmp_path / "model", n=2, max_concurrent_samples=1)
    config.name = "turns"
    config.rollout.n = 1  # nothing is trained here, and one trajectory tells all
    config.environment.name = "calculator"  # what answers is given to each worker by hand
    config.async_training.staleness_threshold = 1.0
    config.async_training.partial_rollout = True
    engine = await Engine.start(config, STOPS)
    with start_valkey(tmp_path / "redis", "secret") as server:
        sync = Ledger(connect(server.url), "turns")
        sync.run(ops.configure(1000, 2, 0, 3, 1000, "test"))
        ledger = AsyncLedger(connect_async(server.url), "turns")
        try:
            yield Stack(config, engine, ledger, sync)
        finally:
            await ledger.close()
            sync.close()
            engine.shutdown()


def check(t: Trajectory, model: Any) -> None:
    """Who said what, under which version, and with which probability."""
    check_turns(t.turn_ends, t.loss_mask, t.finish_reason)
    on = t.loss_mask > 0
    assert not t.log_probs[~on].any()
    ids = [*PROMPT_IDS, *t.token_ids.tolist()]
    expected = np.asarray(tiny_models.token_log_probs(model, ids))[len(PROMPT_IDS) - 1 :]
    assert np.abs(expected - t.log_probs)[on].max() < 1e-4


async def test_turns_go_on_elsewhere_as_if_nothing_had_been(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine start for both."""
    await stack.commit()
    with monkeypatch.context() as greedy:
        greedy.setattr(samples, "sampling_seed", lambda *_: None)
        await interrupted_anywhere(stack)
    await drained_at_any_moment(stack)


async def interrupted_anywhere(stack: Stack) -> None:
    """Greedy: at every token within a turn, and at every answer of the environment's."""
    model = tiny_models.build("llama")
    expected = await stack.finished(stack.worker(OWNERS[0], Counting(TURNS)), stack.issue())
    check(expected, model)
    whole = expected.token_ids.tolist()
    assert expected.turns == TURNS
    assert 12 < len(whole) < stack.config.data.max_response_length, f"choose other STOPS: {whole}"
    assert expected.environment_metrics == {"heard": float(TURNS)}

    async def continued(sample_id: str, cut: int) -> None:
        """Under the next version, elsewhere; `cut` tokens are there."""
        t = await stack.parked(sample_id)
        assert t.token_ids.tolist() == whole[:cut]
        before = stack.version
        await stack.commit()
        done = await stack.finished(stack.worker(OWNERS[1], Counting(TURNS)), sample_id)
        assert done.token_ids.tolist() == whole, f"interrupted at token {cut}"
        assert done.loss_mask.tolist() == expected.loss_mask.tolist()
        assert (done.turn_ends, done.finish_reason) == (expected.turn_ends, expected.finish_reason)
        assert done.environment_metrics == expected.environment_metrics
        assert done.segments == [Segment(before, 0, cut), Segment(stack.version, cut, len(whole))]
        check(done, model)

    within = 0
    for cut in range(1, len(whole)):
        if not expected.loss_mask[cut] or not expected.loss_mask[cut - 1]:
            continue  # between turns: below
        sample_id, engine = stack.issue(), CutEngine(stack, cut)
        engine.worker = stack.worker(OWNERS[0], Counting(TURNS), engine)
        await asyncio.wait_for(engine.worker.run(), 30)
        await asyncio.wait_for(engine.worker.drain(), 30)
        await continued(sample_id, cut)
        within += 1
    assert within > TURNS, f"{within} points within turns: choose other STOPS"

    for call in range(1, TURNS + 1):
        environment, sample_id = Counting(TURNS), stack.issue()
        environment.hang_at = call
        worker = stack.worker(OWNERS[0], environment)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            while environment.stepped < call:
                await asyncio.sleep(0.005)
        await asyncio.wait_for(worker.drain(), 10)
        await asyncio.wait_for(running, 10)
        if call < TURNS:
            await continued(sample_id, expected.turn_ends[call - 1])
        else:
            t = await stack.parked(sample_id)
            assert t.awaits_environment
            assert t.token_ids.tolist() == whole, "all is said; only whether it is done is open"
            assert (await stack.finished(stack.worker(OWNERS[1], Counting(TURNS)), sample_id)).turns == TURNS


async def drained_at_any_moment(stack: Stack) -> None:
    """Sampled, with the engine's own abort at moments that nobody chose: the log-probs are the sampler's."""
    model = tiny_models.build("llama")
    moments = 0
    for number in range(8):
        sample_id, environment = stack.issue(), Counting(TURNS)
        worker = stack.worker(OWNERS[0], environment)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            while not (environment.stepped >= number % TURNS and stack.engine.running):
                if worker.samples_finished:
                    break
                await asyncio.sleep(0)
        await asyncio.wait_for(worker.drain(), 10)
        await asyncio.wait_for(running, 10)
        raw = (await stack.ledger.run(ops.payloads([sample_id])))[0]
        if raw is None:
            moments += 1
            await stack.commit()
            t = await stack.finished(stack.worker(OWNERS[1], Counting(TURNS)), sample_id)
        else:
            [t] = decode_sample(raw.sample).trajectories
        check(t, model)
    print(f"{moments} of 8 trajectories were interrupted")
    assert moments, "nothing was interrupted"
