"""What a rollouter does when its engine fails: logic alone, with stand-ins for engine and ledger."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from headrace.config.run import RunConfig
from headrace.ledger.replies import Taken, TakeReply, TakeStatus
from headrace.v1 import sync_pb2 as pb
from headrace.wire.payloads import Prompt, encode_prompt
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter.generation.seeds import sampling_seed
from headrace_rollouter.generation.work import Worker
from headrace_rollouter.inference.engine import EngineFailed
from headrace_rollouter.membership.member import Member
from tests.in_process_reward import in_process


def config(**async_training: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m", "dtype": "float32"},
            "data": {"train_files": ["a"], "max_prompt_length": 8, "max_response_length": 8},
            "rollout": {"total_rollout_steps": 8, "test_freq": 0, "n": 2},
            "actor": {"ppo_mini_batch_size": 2},
            "async_training": async_training,
            "custom_reward_function": {"path": "r"},
        }
    )


class Engine:
    """Dead: refuses every request and does not answer."""

    generated_tokens = 0
    workers = 1
    canary_answer = 0.0
    pauses = 0

    async def pause(self) -> None:
        self.pauses += 1

    async def generate(self, *_: Any) -> Any:
        raise RuntimeError("engine core died")

    async def check(self) -> None:
        raise EngineFailed("the engine does not answer")

    async def resume(self, version: int) -> None:
        pass

    async def canary(self, _: Any) -> float:
        return self.canary_answer


class Ledger:
    """Hands out one sample, and remembers what was asked."""

    def __init__(self) -> None:
        prompt = Prompt("0000000000", 0, 0, 0, np.asarray([1], np.int32), "s", "t")
        self._items = [Taken("0000000000", 1, encode_prompt(prompt), None, 0)]
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    async def run(self, op: Any) -> Any:
        self.asked.append((op.script, op.args))
        await asyncio.sleep(0)
        if op.script == "take":
            items, self._items = self._items, []
            return TakeReply(TakeStatus.OK if items else TakeStatus.EMPTY, items)
        return []


def worker(ledger: Any, engine: Any, c: RunConfig) -> Worker:
    found = Worker(c, ledger, engine, in_process(lambda *_: 1.0), str, "owner", SampleReader(c, 96))
    found.resumed(3)
    found.trusted.set()
    return found


async def test_a_dead_engine_ends_the_rollouter_and_fails_no_sample() -> None:
    """Else it would take every prompt there is and finish none, under a beat that goes on."""
    ledger = Ledger()
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(worker(ledger, Engine(), config()).run(), 10)
    assert "fail" not in [script for script, _ in ledger.asked], (
        "the engine's death is not the sample's fault"
    )


@pytest.mark.parametrize(
    ("async_training", "oldest"),
    [
        ({"staleness_threshold": 0.5, "partial_rollout": True}, -1),
        ({"staleness_threshold": 0.5, "partial_rollout": True, "max_version_gap": 2}, 2),
        ({"staleness_threshold": 0.5, "partial_rollout": True, "max_version_gap": 1}, 3),
        ({"staleness_threshold": 0.5, "partial_rollout": False}, 3),
        ({"staleness_threshold": 0.0}, 3),
    ],
)
async def test_parked_work_is_continued_only_where_the_gap_may_grow(
    async_training: dict[str, Any], oldest: int
) -> None:
    ledger = Ledger()
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(worker(ledger, Engine(), config(**async_training)).run(), 10)
    takes = [args for script, args in ledger.asked if script == "take"]
    assert {args[4] for args in takes} == {oldest}


async def test_a_pause_waits_for_old_work_only() -> None:
    """What would cross too many versions ends first, also what a take has yet to bring; the rest freezes."""
    c = config(staleness_threshold=0.5, max_version_gap=2)
    engine = Engine()
    w = worker(Ledger(), engine, c)
    member = Member(c, engine, w, "owner", "127.0.0.1:1", "")  # type: ignore[arg-type]
    w._oldest.update({("old", 1): 2, ("young", 1): 3})
    w.taking = True
    pausing = asyncio.create_task(member._pause(pb.MemberPause(round=1, finish_through=2)))

    async def still_waits() -> None:
        await asyncio.sleep(0.1)
        assert not pausing.done()
        assert engine.pauses == 0

    await still_waits()
    del w._oldest["old", 1]
    await still_waits()
    w._oldest["brought", 1] = 2
    w.taking = False
    await still_waits()
    del w._oldest["brought", 1]
    await asyncio.wait_for(pausing, 5)
    assert engine.pauses == 1
    reports = [member.stream.outgoing.get_nowait() for _ in range(member.stream.outgoing.qsize())]
    assert reports[-1] is not None
    assert reports[-1].WhichOneof("report") == "paused"
    assert not w.serving.is_set()


async def test_a_pause_that_waits_for_nothing_freezes_at_once() -> None:
    c = config(staleness_threshold=0.5)
    engine = Engine()
    w = worker(Ledger(), engine, c)
    member = Member(c, engine, w, "owner", "127.0.0.1:1", "")  # type: ignore[arg-type]
    w._oldest["old", 1] = 0
    await asyncio.wait_for(member._pause(pb.MemberPause(round=2)), 5)
    assert engine.pauses == 1


async def test_a_pause_of_what_is_paused_already_waits_for_nothing_and_says_so() -> None:
    c = config(staleness_threshold=0.5)
    engine = Engine()
    w = worker(Ledger(), engine, c)
    member = Member(c, engine, w, "owner", "127.0.0.1:1", "")  # type: ignore[arg-type]
    w.paused()
    w._oldest["frozen", 1] = 0
    await asyncio.wait_for(member._pause(pb.MemberPause(round=3, finish_through=2)), 5)
    assert engine.pauses == 0
    report = member.stream.outgoing.get_nowait()
    assert report is not None
    assert report.paused.round == 3


@pytest.mark.parametrize(("difference", "trusted"), [(0.01, True), (0.2, False), (math.nan, False)])
async def test_only_a_canary_that_agrees_is_trusted(difference: float, trusted: bool) -> None:
    engine, c = Engine(), config()
    engine.canary_answer = difference
    w = worker(Ledger(), engine, c)
    member = Member(c, engine, w, "owner", "127.0.0.1:1", "")  # type: ignore[arg-type]
    resume = member._resume(pb.Resume(version=4, canary=pb.Canary(token_ids=[1, 2], log_probs=[-1.0])))
    if trusted:
        await resume
    else:
        with pytest.raises(EngineFailed, match="differ"):
            await resume
    assert w.trusted.is_set() == trusted
    assert w.version == 4


async def test_without_a_canary_results_wait() -> None:
    engine, c = Engine(), config()
    w = worker(Ledger(), engine, c)
    member = Member(c, engine, w, "owner", "127.0.0.1:1", "")  # type: ignore[arg-type]
    await member._resume(pb.Resume(version=4))
    assert w.serving.is_set()
    assert not w.trusted.is_set()
    assert member.stream.outgoing.empty(), "it has compared nothing, and reports no difference"


def test_sampling_seeds_differ_in_everything_that_identifies_a_trajectory() -> None:
    seeds = {
        sampling_seed(run, sample, index, have)
        for run in (0, 1)
        for sample in ("0000000000", "0000000001")
        for index in (0, 1)
        for have in (0, 5)
    }
    assert len(seeds) == 16
    assert sampling_seed(0, "0000000000", 0, 0) == sampling_seed(0, "0000000000", 0, 0)
