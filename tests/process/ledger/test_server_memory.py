"""A server whose memory is used up: refused before the first write, waited for, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace.config.redis_memory import TRACE_BYTES, largest_sample_bytes, needed_bytes, too_small
from headrace.config.run import RunConfig, TraceConfig
from headrace.connections.redis_client import connect, connect_async
from headrace.ledger import AsyncLedger, LedgerError, SyncLedger, adopt, audit, ops, scripts
from headrace.local.valkey_server import ValkeyServer, start_valkey
from headrace.wire.payloads import FinishReason, Prompt, Sample, Segment, Trajectory, encode_sample
from tests.fast.rollouter.test_rollouter_parts import config as run_config

MEBI = 2**20
LIMIT = 12 * MEBI
PROMPTS = 24


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path, "secret", max_memory_bytes=LIMIT) as server:
        yield server


def begun(client: redis.Redis) -> SyncLedger:
    ledger = SyncLedger(client, "full")
    ledger.run(ops.configure(PROMPTS, 4, 1, 1, PROMPTS, "f"))
    ledger.run(ops.open_term())
    assert ledger.run(ops.open_lineage(0)).ok
    adopt(ledger, 1, {})
    ledger.run(ops.issue(0, [b"p"] * PROMPTS, True))
    ledger.run(ops.hold(1, 1, 1))
    ledger.run(ops.commit(1, 1, 1, 0, "d", ["a"], False, False))
    return ledger


def finish(sample_id: str) -> ops.Op[object]:
    return ops.finish("a", sample_id, 1, b"x" * MEBI, 0, 0, 1)


def until_refused(ledger: SyncLedger, ids: list[str]) -> int:
    """How many finish before the server says that its memory is used up."""
    for done, sample_id in enumerate(ids):
        try:
            ledger.run(finish(sample_id))
        except LedgerError as error:
            if "maxmemory" not in str(error):
                raise
            return done
    raise AssertionError("the memory was never used up")


def test_back_pressure_and_not_an_error(small: ValkeyServer) -> None:
    with connect(small.url) as client:
        ledger = begun(client)
        ids = [t.sample_id for t in ledger.run(ops.take("a", 0, PROMPTS)).items]
        done = until_refused(ledger, ids)
        assert 4 <= done < PROMPTS
        report = audit(client, "full")
        assert report.balanced, f"refused in the middle of a script: {report.problems}"
        assert (report.counts["queued"], report.counts["in_flight"]) == (done, PROMPTS - done)
        waited = asyncio.run(_finish_while_the_trainer_makes_room(small.url, ledger, ids[done]))
        assert waited, "the memory was not used up: the test is blind"
        assert audit(client, "full").counts["queued"] == done - 4 + 1
        assert client.info("stats")["evicted_keys"] == 0


async def _finish_while_the_trainer_makes_room(url: str, ledger: SyncLedger, sample_id: str) -> bool:
    """What a rollouter does: waits. Everything that makes room goes through meanwhile."""
    patient = AsyncLedger(connect_async(url), "full", waits_when_full=True)
    finishing = asyncio.create_task(patient.run(finish(sample_id)))
    async with asyncio.timeout(20.0):
        while not patient.waits_for_memory:
            assert not finishing.done()
            await asyncio.sleep(0.02)
        ledger.run(ops.beat("a", 1))  # signs of life are not refused
        batch = ledger.run(ops.claim(1, 0, 4)).items
        assert ledger.run(ops.train(1, 1, [c.sample_id for c in batch])) == "ok"
        assert await finishing == "ok"
    still_waits = patient.waits_for_memory
    await patient.close()
    return not still_waits


def test_every_script_says_whether_it_needs_memory() -> None:
    for name in scripts.names():
        first = scripts.source(name).splitlines()[0]
        assert first == ("#!lua" if name in scripts.BRINGS_BYTES else "#!lua flags=allow-oom"), name


# -- how much is enough --------------------------------------------------------------------------------


def test_the_largest_sample_is_as_large_as_said() -> None:
    config = run_config()
    n, length, asked = config.rollout.n, config.data.max_response_length, config.data.max_prompt_length
    import numpy as np

    prompt = Prompt("0" * 10, 0, 0, 0, np.zeros(asked, np.int32), "source", "truth", {})
    trajectories = [
        Trajectory(
            np.zeros(length, np.int32),
            np.zeros(length, np.float32),
            np.ones(length, np.uint8),
            [Segment(0, 0, length // 2), Segment(1, length // 2, length)],
            1.0,
            FinishReason.LENGTH,
        )
        for _ in range(n)
    ]
    real = len(encode_sample(Sample(prompt, trajectories, "rollouter-0-12345678", 1, 1.0, 1.0)))
    assert real <= largest_sample_bytes(config)
    payload = n * length * 9
    assert payload <= real, "the count of bytes per token is too low"


def test_a_server_that_is_too_small_is_refused() -> None:
    plain = run_config().model_dump()
    needed = needed_bytes(RunConfig.model_validate(plain))
    plain["redis"]["max_memory_bytes"] = needed
    config = RunConfig.model_validate(plain)
    assert too_small(config, needed) is None
    assert too_small(config, 0) is None
    assert needed_bytes(config.model_copy(update={"trace": TraceConfig(enable=True)})) > needed + TRACE_BYTES
    plain["redis"]["max_memory_bytes"] = needed - 1
    with pytest.raises(ValueError, match=r"redis.max_memory_bytes: .* MiB of memory cannot hold .*staleness"):
        RunConfig.model_validate(plain)
