"""Checkpoints, the weight server and the run log, each alone, on a process group of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.comm.store import serve_store
from headrace.v1 import sync_pb2 as pb
from headrace.weights.snapshot import Snapshot
from headrace_trainer.checkpoint import MANIFEST, Checkpoints, Progress, newest
from headrace_trainer.optimize import Learnable
from headrace_trainer.ranks import Ranks
from headrace_trainer.report import Report
from headrace_trainer.run_log import RunLog, rank_correlation
from headrace_trainer.weight_server import MovedOn, WeightServer
from tests.unit.test_rollouter_parts import config as run_config


def training(seed: int) -> Learnable:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    schedule.step()
    return Learnable(model, optimizer, schedule)


@pytest.mark.parametrize("names", [["policy"], ["policy", "critic"]])
def test_a_checkpoint_brings_everything_back(names: list[str], tmp_path: Path, ranks: Ranks) -> None:
    parts = {name: training(seed) for seed, name in enumerate(names)}
    progress = Progress(
        step=3, optimizer_steps=6, version=2, lineage=1, trained={"0000000000": 1}, kl_coef=0.25
    )
    path = Checkpoints(tmp_path, 2, parts, ranks).save(progress)
    assert newest(tmp_path) == path
    others = {name: training(seed + 7) for seed, name in enumerate(names)}
    assert Checkpoints(tmp_path, 2, others, ranks).load(path) == progress
    for name, part in parts.items():
        other = others[name]
        for p, q in zip(part.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(part.optimizer.state[p]["exp_avg"], other.optimizer.state[q]["exp_avg"])
        assert other.schedule.state_dict()["last_epoch"] == part.schedule.state_dict()["last_epoch"]


def test_a_checkpoint_without_a_critic_does_not_serve_one(tmp_path: Path, ranks: Ranks) -> None:
    path = Checkpoints(tmp_path, 2, {"policy": training(0)}, ranks).save(Progress(step=3))
    both = {"policy": training(1), "critic": training(2)}
    with pytest.raises(ValueError, match="critic"):
        Checkpoints(tmp_path, 2, both, ranks).load(path)


def test_saving_is_atomic_and_keeps_the_newest(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, 2, {"policy": training(0)}, ranks)
    for step in (1, 2, 3):
        checkpoints.save(Progress(step=step, lineage=1))
    assert sorted(d.name for d in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    # A save that was cut off: nobody takes it for a checkpoint, the next save removes it.
    cut_off = tmp_path / ".step_00000004.tmp"
    cut_off.mkdir()
    assert newest(tmp_path) == tmp_path / "step_00000003"
    before = (tmp_path / "step_00000003" / MANIFEST).stat().st_ino
    checkpoints.save(Progress(step=3, lineage=1))
    assert (tmp_path / "step_00000003" / MANIFEST).stat().st_ino == before, "the same step is there already"
    checkpoints.save(replace(Progress(step=3, lineage=2), tokens=7))
    assert json.loads((tmp_path / "step_00000003" / MANIFEST).read_text())["lineage"] == 2
    assert not cut_off.exists()


def test_a_damaged_manifest_says_so(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, 2, {"policy": training(0)}, ranks)
    path = checkpoints.save(Progress(step=1))
    (path / MANIFEST).write_text('{"format": 1, "step"')
    with pytest.raises(ValueError, match=r"manifest\.json"):
        checkpoints.load(path)


def test_the_server_serves_the_version_that_was_asked_for(ranks: Ranks) -> None:
    """A late joiner that asks for v must not get v+1 under v's name."""
    model = training(0).model
    store = serve_store("127.0.0.1")
    server = WeightServer(Snapshot(model, "float32", 1024, None), store, 0, torch.device("cpu"))
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


def test_waits_of_updates_without_a_row_add_up(tmp_path: Path, ranks: Ranks) -> None:
    """An update whose samples all went back has no row; its seconds go into the next one's, none is lost."""
    report = Report(run_config(), None, ranks, tmp_path)  # type: ignore[arg-type]
    report._sync = {"sync/pause_s": 0.2}
    for _ in range(2):
        report._phases["param_sync"] = report._phases.get("param_sync", 0.0) + 0.3
        report.waited_for_generation()
    assert report._phases == pytest.approx({"param_sync": 0.2, "wait_prev_gen": 0.4})
    report.close()


def test_rank_correlation() -> None:
    assert rank_correlation([1, 5, 9, 20]) == pytest.approx(1.0)
    assert rank_correlation([20, 9, 5, 1]) == pytest.approx(-1.0)
    assert rank_correlation([7, 7, 7]) == 0.0
    assert rank_correlation([3]) == 0.0
    # Ties share their mean rank: ranks 0.5, 0.5, 2 against places 0, 1, 2.
    assert rank_correlation([2, 2, 8]) == pytest.approx(1.5 / (1.5 * 2.0) ** 0.5)
