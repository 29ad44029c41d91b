"""The weight server and the run log, each alone, on a process group of one."""

from __future__ import annotations

import gc
import json
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from headrace.metrics.row_keys import PARTS, problems
from headrace.metrics.sync_and_eval import SYNC_ROW
from headrace.v1 import sync_pb2 as pb
from headrace.weights.snapshot import Snapshot
from headrace.weights.transports.store import serve_store
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.records.report import StepReport
from headrace_trainer.records.run_log import (
    MOST_PARTS,
    RunLog,
    environment_metrics,
    part_means,
    part_sums,
    rank_correlation,
)
from headrace_trainer.records.step_clock import StepClock, seconds
from headrace_trainer.sync.weight_server import MovedOn, WeightServer
from tests.fast.rollouter.test_rollouter_parts import config as run_config
from tests.support.learners import training


def test_the_server_serves_the_version_that_was_asked_for(ranks: Ranks) -> None:
    """A late joiner that asks for v must not get v+1 under v's name."""
    model = training(0).model
    store = serve_store("127.0.0.1")
    server = WeightServer(Snapshot(model, "float32", 1024, None), store, ranks)
    server.write_snapshot(4)
    digest, _ = server.send(4, 1024)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert server.send(4, 1024)[0] == digest, "the snapshot does not follow the live parameters"
    server.write_snapshot(5)
    with pytest.raises(MovedOn, match="version 4 was asked for, the snapshot is 5"):
        server.send(4, 1024)
    assert server.send(5, 1024)[0] != digest
    server.close()


def test_a_follower_waits_for_a_word_and_not_for_a_clock() -> None:
    """Each time-out of the store leaves two lines in the log, of every rank."""
    waits: list[timedelta] = []

    class Store(dist.HashStore):
        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            assert timeout is not None
            waits.append(timeout)

        def get(self, key: str) -> bytes:
            return b"stop"

    store: Any = Store()
    follower: Any = SimpleNamespace(_store=store, snapshot=None, failure=None)
    WeightServer._follow(follower)
    assert waits == [pytest.approx(timedelta(days=20), abs=timedelta(days=4))]
    assert follower.failure is None


def test_a_follower_has_heard_the_last_word_before_the_store_is_gone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of a connection that breaks while it waits the store writes a page."""
    snapshot = Snapshot(training(0).model, "float32", 1024, None)
    store = serve_store("127.0.0.1")
    rank_0: Any = SimpleNamespace(is_first=True, rank=0, world_size=2)
    rank_1: Any = SimpleNamespace(is_first=False, rank=1, world_size=2)
    theirs = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    follower = WeightServer(snapshot, theirs, rank_1)
    first = WeightServer(snapshot, store, rank_0)
    first.dismiss()
    del store, first
    gc.collect()
    follower.close()
    follower.check()
    assert capfd.readouterr().err == ""


def test_a_canary_belongs_to_the_version_it_reports(tmp_path: Path) -> None:
    """With overlapped syncs, reports on v come before the row of v is begun, those on v+1 soon after."""
    log = RunLog(tmp_path)
    log.canary(1, 1e-6)
    log.canary(1, 3e-6)
    log.committed(pb.Committed(version=1, members=2), 10, 1.0)
    log.canary(2, 5e-6)
    log.committed(pb.Committed(version=2, members=2), 10, 1.0)
    log.committed(pb.Committed(version=3, members=0), 10, 1.0)
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "sync.jsonl").read_text().splitlines()]
    assert [(r["version"], r["logprob_max_abs_diff"]) for r in rows] == [(1, 3e-6), (2, 5e-6), (3, None)]
    assert {tuple(row) for row in rows} == {tuple(k.name for k in SYNC_ROW)}


def test_a_canary_is_in_the_row_after_its_report(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    key = "sync/logprob_max_abs_diff"
    assert log.canary_metrics() == {}
    log.canary(0, 1e-6)
    assert (log.canary_metrics(), log.canary_metrics()) == ({key: 1e-6}, {})
    log.committed(pb.Committed(version=1, members=2), 10, 1.0)
    log.canary(1, 2e-7)
    log.canary(0, 9e-6)  # late, of a version that is behind
    assert log.canary_metrics() == {key: 2e-7}
    log.canary(1, 1e-7)  # a second member's, not larger
    assert log.canary_metrics() == {}
    log.canary(1, 3e-7)
    assert log.canary_metrics() == {key: 3e-7}
    log.close()


def test_waits_of_updates_without_a_row_add_up(tmp_path: Path, ranks: Ranks) -> None:
    """An update whose samples all went back has no row; its seconds go into the next one's, none is lost."""
    report = StepReport(run_config(), None, ranks, tmp_path)  # type: ignore[arg-type]
    now = 0
    report._clock = StepClock(lambda: now)
    report._sync = {"sync/pause_s": 0.2}
    for _ in range(2):
        with report.phase("param_sync"):
            now += 300_000_000
        report.waited_for_generation()
    began, ended, spent = report._clock.row()
    assert ended - began == 600_000_000
    assert spent == {"gen_wait": 0, "param_sync": 200_000_000, "wait_prev_gen": 400_000_000}
    report.close()


@given(st.data())
def test_every_nanosecond_of_a_step_has_one_phase(data: st.DataObject) -> None:
    """Whatever is nested, moved and cut into rows: phases add up to their row, rows to the time."""
    now, rows = 0, []
    clock = StepClock(lambda: now)
    depth = 0
    for act in data.draw(st.lists(st.sampled_from(["enter", "leave", "wait", "work", "move", "row"]))):
        now += data.draw(st.integers(0, 10**15))
        if act == "enter":
            clock.enter(data.draw(st.sampled_from(["ack", "adv", "param_sync"])))
            depth += 1
        elif act == "leave" and depth:
            clock.leave()
            depth -= 1
        elif act == "wait":
            clock.begin_wait()
        elif act == "work":
            clock.end_wait()
        elif act == "move":
            clock.move("param_sync", "wait_prev_gen", data.draw(st.integers(0, 10**15)))
        elif act == "row":
            rows.append(clock.row())
    rows.append(clock.row())
    assert rows[0][0] == 0
    assert rows[-1][1] == now
    assert all(one[1] == other[0] for one, other in pairwise(rows))
    for began, ended, spent in rows:
        assert sum(spent.values()) == ended - began
        assert sum(round(seconds(ns) * 1e9) for ns in spent.values()) == round(seconds(ended - began) * 1e9)
        assert all(ns >= 0 for ns in spent.values())


def test_rank_correlation() -> None:
    assert rank_correlation([1, 5, 9, 20]) == pytest.approx(1.0)
    assert rank_correlation([20, 9, 5, 1]) == pytest.approx(-1.0)
    assert rank_correlation([7, 7, 7]) == 0.0
    assert rank_correlation([3]) == 0.0
    # Ties share their mean rank: ranks 0.5, 0.5, 2 against places 0, 1, 2.
    assert rank_correlation([2, 2, 8]) == pytest.approx(1.5 / (1.5 * 2.0) ** 0.5)


def test_parts_of_the_reward_are_means_over_those_that_have_them() -> None:
    first = part_sums([{"right": 1.0, "right/steps": 3.0}, {"right": 0.0}])
    second = part_sums([{"right": 1.0}, {"late": -1.0}, {}])
    means = part_means([first, second])
    assert means == {
        "reward_part/late": -1.0,
        "reward_part/right": pytest.approx(2 / 3),
        "reward_part/right/steps": 3.0,
    }
    assert problems(set(means), {PARTS}) == problems({"reward_part/NAME"}, {PARTS})
    many = part_sums([{f"{n:04d}": 1.0 for n in range(1000)}])
    assert len(part_means([many])) == MOST_PARTS


def test_counts_of_environments_are_means_over_those_that_have_them_and_bounded() -> None:
    assert environment_metrics([1, 3], [{"calls": 2.0}, {"calls": 4.0, "late": 1.0}]) == {
        "env/turns/mean": 2.0,
        "env/turns/max": 3.0,
        "env/calls/mean": 3.0,
        "env/late/mean": 1.0,
    }
    many = environment_metrics([1], [{f"{n:04d}": 1.0 for n in range(1000)}])
    assert len(many) == MOST_PARTS + 2
