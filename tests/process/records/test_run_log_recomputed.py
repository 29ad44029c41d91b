"""The real report, fed with mixed versions that short runs of an engine do not come by, recomputed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import redis

from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.ledger.replies import Claimed
from headrace.records.trained_log import TrainedLog
from headrace.service.telemetry import RolloutTelemetry, encode, telemetry_key
from headrace.traces.recording import Recorder
from headrace.v1 import sync_pb2 as pb
from headrace.wire.payloads import FinishReason, Prompt, Sample, Segment, Trajectory
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.batch import Batch
from headrace_trainer.learning.learner import Learned
from headrace_trainer.learning.update import UpdateSums
from headrace_trainer.records.report import StepReport
from tests.fast.rollouter.test_rollouter_parts import config as run_config
from tests.support import recomputed

GROUP, MINI = 4, 2
FIRST = 3
"""The version that this start commits first: samples may be older from its first step on."""


def config(**changes: object) -> RunConfig:
    plain = run_config().model_dump()
    plain["rollout"]["n"] = GROUP
    plain |= {"trace": {"enable": True}, "dump": {"enable": True, "samples_per_update": 100}} | changes
    return RunConfig.model_validate(plain)


def trajectory(rng: random.Random, window: int) -> Trajectory:
    """Tokens of one version or of several, none newer than the window's."""
    length = rng.randint(1, 8)
    versions = sorted(rng.randint(max(0, window - 3), window) for _ in range(rng.randint(1, min(3, length))))
    versions = sorted(set(versions))
    cuts = [0, *sorted(rng.sample(range(1, length), len(versions) - 1)), length]
    return Trajectory(
        np.arange(length, dtype=np.int32),
        np.full(length, -1.0, np.float32),
        np.ones(length, np.uint8),
        [Segment(v, cuts[i], cuts[i + 1]) for i, v in enumerate(versions)],
        1.0,
        rng.choice([FinishReason.STOP, FinishReason.LENGTH]),
        reward=rng.choice([0.0, 1.0]),
    )


@pytest.mark.parametrize("waits", [False, True])
def test_the_run_log_is_what_the_raw_records_say(
    waits: bool,
    ranks: Ranks,
    quick_valkey: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setenv("HEADRACE_RUN_DIR", str(tmp_path))
    (tmp_path / "private").mkdir()  # a runner's directory: one clock
    quick_valkey.flushall()
    ledger = SyncLedger(quick_valkey, "report")
    ledger.run(ops.configure(100, 1, 1, 1, 100, "print"))
    made = config(name="report")
    report = StepReport(made, ledger, ranks, tmp_path)
    trained, p = TrainedLog(tmp_path), TrainingProgress(lineage=1)
    rollouter = Recorder(tmp_path, "rollouter-0")
    rollouter.complete("tells", 0, 0, track="engine")
    rollouter.complete("busy", 10**9, 4 * 10**9, track="engine")
    records: dict[str, dict[str, str]] = {}

    def commit(version: int) -> None:
        told_at = 0.4 * (version - FIRST + 1)
        active = min(max(told_at - 1.0, 0.0), 3.0)
        told = RolloutTelemetry(active, told_at, 0, 1, 0, 0, version)
        quick_valkey.hset(telemetry_key("report"), "rollouter-0", encode(told))
        pause_s = rng.choice([0.0, 1e-4, 10.0])
        report.committed(pb.Committed(version=version, round=version + 1, pause_s=pause_s), 10)

    def update(window: int, last: bool) -> None:
        ids = [f"{len(records) + i:010d}" for i in range(rng.randint(1, 4))]
        samples = [
            Sample(
                Prompt(i, int(i), 0, 0, np.arange(rng.randint(1, 5), dtype=np.int32), "s", "t"),
                [trajectory(rng, window) for _ in range(GROUP)],
                "rollouter-0",
                1,
            )
            for i in ids
        ]
        items = [Claimed(s.prompt.sample_id, 1, s.min_version, s.max_version, s.tokens) for s in samples]
        batch = Batch(items, [samples[i : i + MINI] for i in range(0, len(samples), MINI)])
        report.begin_update(batch, window, 3.0)
        learned = Learned(UpdateSums(), len(batch.mini), len(batch.mini))
        for name in rng.sample(["old_log_prob", "adv", "update_actor"], rng.randint(0, 3)):
            with report.phase(name):
                sum(range(rng.randint(0, 20_000)))
        with report.phase("ack"):
            p.step += 1
            p.optimizer_steps += learned.optimizer_steps
            trained.trained(1, p.step, ids, window=window)
            records.update({i: {"state": "trained", "step": str(p.step)} for i in ids})
        if last:
            with report.phase("param_sync"):
                if not waits and window > FIRST:
                    commit(window)  # of the round that went on while this window was trained
                with report.phase("save_checkpoint"):
                    sum(range(rng.randint(0, 20_000)))
                report.window_ends()
                p.step_of_version[str(window + 1)] = p.optimizer_steps
                if waits:
                    commit(window + 1)
            if waits:
                report.waited_for_generation()
        report.end_update(batch, p, learned, 0.1)

    p.step_of_version[str(FIRST)] = 0
    commit(FIRST)
    for window in range(FIRST, FIRST + 6):
        updates = rng.randint(1, 3)
        for number in range(updates):
            update(window, number == updates - 1)
    if not waits:
        commit(FIRST + 6)
    report.close()
    found = recomputed.Records(tmp_path, GROUP, MINI, waits, records)
    assert recomputed.check(found) == []
    log = recomputed.rows(tmp_path / "metrics.jsonl")
    stale = {name: log[-1][f"fully_async/count/stale_{name}_processed"] for name in ("samples", "trajectory")}
    assert 0 < stale["samples"] < stale["trajectory"] < GROUP * stale["samples"], "each counts by itself"
    assert max(row["fully_async/partial/total_partial_num"] for row in log) > 0
