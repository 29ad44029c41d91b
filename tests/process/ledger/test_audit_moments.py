"""The audit at every moment of a run, on or cut off there: what differs is explained, none is a problem."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest
import redis

from headrace.ledger.client import SyncLedger
from headrace.records.audit import audit_run
from headrace_trainer.distributed.ranks import Ranks
from tests.process.ledger.audited_run import NAME, SmallRun, story


@pytest.mark.parametrize("seed", range(6))
def test_whatever_differs_is_explained(
    seed: int, quick_valkey: redis.Redis, ranks: Ranks, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    quick_valkey.flushall()
    run = SmallRun(tmp_path / "run", quick_valkey, ranks, rng)
    looked, explained = Counter[str](), 0

    def look(moment: str) -> None:
        nonlocal explained
        if moment in ("stats", "audit") or rng.random() < 0.5:
            return
        done = audit_run(run.layout, run.ledger, is_on=rng.random() < 0.5)
        assert done.problems == [], f"behind {moment}, after {ends}"
        looked[moment] += 1
        explained += bool(done.explained)

    ends: list[str] = []
    run.watch = look
    ends = story(run, rng, starts=4)
    done = audit_run(run.layout, run.ledger, is_on=False)
    print(f"seed {seed}: {ends}; looked {looked.total()} times, {explained} with something to explain")
    assert done.problems == [], ends
    assert all("was cut off before" in text for text in done.explained), (
        "rows of rounds that were open at a kill"
    )
    assert looked.total() > 40
    assert explained > 0


def test_a_run_that_goes_on_meanwhile(quick_valkey: redis.Redis, ranks: Ranks, tmp_path: Path) -> None:
    """Files and ledger cannot be read at one instant: what falls between the readings is no problem."""
    quick_valkey.flushall()
    run = SmallRun(tmp_path / "run", quick_valkey, ranks, random.Random(1))
    ledger = SyncLedger(quick_valkey, NAME)
    failed: list[Exception] = []

    def go() -> None:
        try:
            for _ in range(4):
                run.train("stop", 2)
            run.train("finish", 0)
        except Exception as error:  # shown by the test's own thread
            failed.append(error)

    thread, looked = threading.Thread(target=go), 0
    thread.start()
    while thread.is_alive():
        done = audit_run(run.layout, ledger, is_on=True)
        assert done.problems == []
        looked += 1
    thread.join(30.0)
    assert failed == []
    assert looked > 5
    assert audit_run(run.layout, ledger, is_on=False).problems == []
