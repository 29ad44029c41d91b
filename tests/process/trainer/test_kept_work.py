"""A trainer is killed while finished samples wait: the next one trains them, nobody generates them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.config.redis_url import build
from headrace.connections.redis_client import connect
from headrace.ledger import SyncLedger, ops
from headrace.ledger.replies import Taken
from headrace.local.valkey_server import start_valkey
from headrace.wire.payloads import FinishReason, Sample, Segment, Trajectory, decode_prompt, encode_sample
from tests.support.no_rollouter import Processes
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PASSWORD = "a-word"
ALL = ("queue", "coordinator", "trainer")
NO_LEASE = {"lease_s": 3600, "max_retries": 0}
"""The scripted owner does not beat."""
OWNER = "rollouter-0-test"
BATCH = 4
GATE = {"staleness_threshold": 1, "partial_rollout": True, "max_version_gap": 2}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Processes]:
    with start_valkey(tmp_path / "redis", PASSWORD) as server:
        made = Processes.make(tmp_path, server, async_training=GATE, ledger=NO_LEASE)
        yield made
        made.close()


@pytest.fixture
def ledger(run: Processes) -> Iterator[SyncLedger]:
    found = SyncLedger(connect(build("127.0.0.1", run.redis_port, PASSWORD)), run.folder.name)
    yield found
    found.close()


def join(ledger: SyncLedger, version: int) -> None:
    """As a rollouter that has caught up."""

    def admitted() -> bool:
        stats = ledger.run(ops.stats())
        return stats.version == version and ledger.run(ops.admit(stats.term, OWNER, version)) == "ok"

    until(admitted, f"version {version} to be committed")


def take(ledger: SyncLedger, version: int, count: int) -> list[Taken]:
    got: list[Taken] = []

    def enough() -> bool:
        got.extend(ledger.run(ops.take(OWNER, version, count - len(got))).items)
        return len(got) == count

    until(enough, f"{count} samples")
    return got


def finish(ledger: SyncLedger, item: Taken, version: int) -> None:
    def answer(reward: float) -> Trajectory:
        ids, log_probs = np.arange(5, 9, dtype=np.int32), np.full(4, -3, np.float32)
        mask = np.ones(4, np.uint8)
        segments = [Segment(version, 0, 4)]
        return Trajectory(ids, log_probs, mask, segments, 1.0, FinishReason.STOP, reward=reward)

    sample = Sample(decode_prompt(item.prompt), [answer(0.0), answer(1.0)], OWNER, item.attempt)
    args = (OWNER, item.sample_id, item.attempt, encode_sample(sample), version, version, sample.tokens)
    assert ledger.run(ops.finish(*args)) == "ok"


def kill_trainer(run: Processes) -> None:
    launcher = psutil.Process(run.running["trainer"].pid)
    family = [launcher, *launcher.children(recursive=True)]
    for process in family:
        process.kill()
    run.running.pop("trainer").wait(10)
    psutil.wait_procs(family, timeout=10)


def test_finished_samples_survive_the_trainer(run: Processes, ledger: SyncLedger) -> None:
    run.up(PASSWORD, *ALL)
    join(ledger, 0)
    *finished, parked = take(ledger, 0, BATCH)
    for item in finished:
        finish(ledger, item, 0)
    assert ledger.run(ops.park(OWNER, parked.sample_id, parked.attempt, b"half of it", 0)) == "ok"
    ids = [item.sample_id for item in finished]
    assert len(ids) == BATCH - 1, "one update wants one more"

    kill_trainer(run)
    run.up(PASSWORD, "trainer")
    opened = [json.loads(line) for line in run.log("trainer").splitlines() if '"lineage opened"' in line]
    found = [(line["lineage"], line["kept"], line["restarted"]) for line in opened]
    assert found == [(1, 0, 0), (2, BATCH, 0)]
    stats = ledger.run(ops.stats())
    assert (stats.kept, stats.requeued) == ({"queued": BATCH - 1, "parked": 1}, {})

    join(ledger, 1)
    (went_on,) = take(ledger, 1, 1)
    assert (went_on.sample_id, went_on.work) == (parked.sample_id, b"half of it")
    finish(ledger, went_on, 1)
    until(lambda: ledger.run(ops.stats()).counts["trained"] == BATCH, "the update")
    for sample_id in ids:
        record = ledger.run(ops.sample(sample_id))
        assert record is not None
        assert [record[key] for key in ("state", "attempt", "lineage")] == ["trained", "1", "2"]
    until(lambda: (run.folder / "metrics.jsonl").read_text(), "the row of the update")
    (row,) = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    assert row["queue/kept"] == BATCH
    assert row["staleness/version_gap/hist"] == {"0": 1, "1": BATCH - 1}
    assert row["staleness/update_gap/max"] == 0, "nothing was trained between the two versions"
    assert run.end("trainer") == 75
    assert run.balanced(PASSWORD)
