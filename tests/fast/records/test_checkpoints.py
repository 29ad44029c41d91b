"""Checkpoints, on a process group of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.records.checkpoints import CHECKPOINT_MANIFEST as MANIFEST
from headrace.records.checkpoints import (
    RESUMED_FROM,
    CheckpointError,
    Manifest,
    complete_checkpoints,
    read_manifest,
)
from headrace_trainer.checkpoints import checkpoint
from headrace_trainer.checkpoints.checkpoint import Checkpoints, SaveFailed
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.checkpoints.resume import adopted, chosen, work_to_keep
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.optimize import Learnable
from tests.support.learners import config, training

KEEPS_TWO = config(trainer={"max_ckpt_to_keep": 2})


@pytest.mark.parametrize("names", [["policy"], ["policy", "critic"]])
def test_a_checkpoint_brings_everything_back(names: list[str], tmp_path: Path, ranks: Ranks) -> None:
    parts = {name: training(seed) for seed, name in enumerate(names)}
    for part in parts.values():
        part.optimizer.step()
        part.schedule.step()
    progress = TrainingProgress(
        step=3, optimizer_steps=6, version=2, lineage=1, trained={"0000000000": 1}, kl_coef=0.25
    )
    path = Checkpoints(tmp_path, KEEPS_TWO, parts, ranks).save(progress)
    assert complete_checkpoints(tmp_path) == [path]
    others = {name: training(seed + 7) for seed, name in enumerate(names)}
    assert Checkpoints(tmp_path, KEEPS_TWO, others, ranks).load(path) == progress
    for name, part in parts.items():
        other = others[name]
        for p, q in zip(part.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(part.optimizer.state[p]["exp_avg"], other.optimizer.state[q]["exp_avg"])
        assert other.schedule.state_dict() == part.schedule.state_dict()
        assert other.optimizer.state_dict()["param_groups"] == part.optimizer.state_dict()["param_groups"]
        assert part.schedule.state_dict()["last_epoch"] == 2


def test_a_checkpoint_without_a_critic_does_not_serve_one(tmp_path: Path, ranks: Ranks) -> None:
    path = Checkpoints(tmp_path, KEEPS_TWO, {"policy": training(0)}, ranks).save(TrainingProgress(step=3))
    both = {"policy": training(1), "critic": training(2)}
    with pytest.raises(CheckpointError, match="critic"):
        Checkpoints(tmp_path, KEEPS_TWO, both, ranks).load(path)


def test_saving_is_atomic_and_keeps_the_newest(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, KEEPS_TWO, {"policy": training(0)}, ranks)
    for step in (1, 2, 3):
        checkpoints.save(TrainingProgress(step=step, lineage=1))
    assert sorted(d.name for d in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    # A save that was cut off: nobody takes it for a checkpoint, the next save removes it.
    cut_off = tmp_path / ".step_00000004.tmp"
    cut_off.mkdir()
    assert complete_checkpoints(tmp_path)[-1] == tmp_path / "step_00000003"
    before = (tmp_path / "step_00000003" / MANIFEST).stat().st_ino
    checkpoints.save(TrainingProgress(step=3, lineage=1))
    assert (tmp_path / "step_00000003" / MANIFEST).stat().st_ino == before, "the same step is there already"
    checkpoints.save(replace(TrainingProgress(step=3, lineage=2), tokens=7))
    assert json.loads((tmp_path / "step_00000003" / MANIFEST).read_text())["lineage"] == 2
    assert not cut_off.exists()


def test_a_save_reads_each_manifest_once(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each names every sample trained up to it."""
    checkpoints = Checkpoints(tmp_path, KEEPS_TWO, {"policy": training(0)}, ranks)
    for step in (1, 2):
        checkpoints.save(TrainingProgress(step=step, lineage=1))
    read: list[str] = []

    def reading(path: Path) -> Manifest:
        read.append(path.name)
        return read_manifest(path)

    monkeypatch.setattr(checkpoint, "read_manifest", reading)
    checkpoints.save(TrainingProgress(step=3, lineage=1))
    assert read == ["step_00000003", "step_00000001", "step_00000002"], (
        "whether it is saved already; the others"
    )


def test_what_is_saved_is_what_was_true_when_saving_began(tmp_path: Path, ranks: Ranks) -> None:
    """Training goes on while the checkpoint is written: neither weights nor ids of later steps are in it."""
    part = training(0)
    saved = {name: p.detach().clone() for name, p in part.model.named_parameters()}
    moments = [part.optimizer.state[p]["exp_avg"].clone() for p in part.model.parameters()]
    progress = TrainingProgress(step=1, trained={"0000000000": 1})
    checkpoints = Checkpoints(tmp_path, KEEPS_TWO, {"policy": part}, ranks)
    path = checkpoints.begin(progress)
    with torch.no_grad():  # the next step, while the thread writes
        for p in part.model.parameters():
            p.add_(1.0)
            part.optimizer.state[p]["exp_avg"].zero_()
    progress.step = 2
    progress.trained["0000000001"] = 2
    checkpoints.wait()
    assert complete_checkpoints(tmp_path) == [path]
    other = training(7)
    loaded = Checkpoints(tmp_path, KEEPS_TWO, {"policy": other}, ranks).load(path)
    assert loaded == TrainingProgress(step=1, trained={"0000000000": 1})
    for (name, p), moment in zip(other.model.named_parameters(), moments, strict=True):
        assert torch.equal(p, saved[name])
        assert torch.equal(other.optimizer.state[p]["exp_avg"], moment)


def test_random_numbers_go_on_where_they_were(tmp_path: Path, ranks: Ranks) -> None:
    torch.manual_seed(5)
    checkpoints = Checkpoints(tmp_path, KEEPS_TWO, {"policy": training(0)}, ranks)
    path = checkpoints.save(TrainingProgress(step=1))
    drawn = torch.rand(3)
    torch.manual_seed(99)
    checkpoints.load(path)
    assert torch.equal(torch.rand(3), drawn)


def test_a_save_that_fails_is_heard_of_and_leaves_the_last_one(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, KEEPS_TWO, {"policy": training(0)}, ranks)
    good = checkpoints.save(TrainingProgress(step=1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_publish", full)
    checkpoints.begin(TrainingProgress(step=2))
    with pytest.raises(SaveFailed, match=r"step_00000002.*No space left"):
        checkpoints.wait()
    with pytest.raises(SaveFailed):
        checkpoints.check()
    assert complete_checkpoints(tmp_path) == [good]


def test_another_models_checkpoint_says_so(tmp_path: Path, ranks: Ranks) -> None:
    path = Checkpoints(tmp_path, KEEPS_TWO, {"policy": training(0)}, ranks).save(TrainingProgress(step=1))
    wide = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(wide.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    other = {"policy": Learnable(wide, optimizer, schedule)}
    with pytest.raises(CheckpointError, match="does not fit"):
        Checkpoints(tmp_path, KEEPS_TWO, other, ranks).load(path)


# -- from which one to go on ---------------------------------------------------------------------------


def made(directory: Path, *steps: int) -> None:
    for step in steps:
        (directory / f"step_{step:08d}").mkdir()
        (directory / f"step_{step:08d}" / MANIFEST).write_text("{}")


def test_the_newest_comes_first_and_what_was_cut_off_not_at_all(tmp_path: Path) -> None:
    made(tmp_path, 9, 10, 2)
    (tmp_path / "step_00000011").mkdir()
    assert chosen(tmp_path, "auto") == "step_00000010"
    assert chosen(tmp_path / "none", "auto") is None


def test_a_path_is_obeyed_once(tmp_path: Path) -> None:
    made(tmp_path, 1, 2, 3)
    wanted = str(tmp_path / "step_00000002")
    assert chosen(tmp_path, wanted) == "step_00000002"
    assert (tmp_path / "aside_1_step_00000003" / MANIFEST).exists(), "nothing is thrown away"
    made(tmp_path, 3)  # saved by the trainer since; it dies and starts again
    assert chosen(tmp_path, wanted) == "step_00000003"
    (tmp_path / RESUMED_FROM).unlink()  # somebody asks again
    assert chosen(tmp_path, wanted) == "step_00000002"
    assert (tmp_path / "aside_2_step_00000003").exists()


def test_going_back_by_a_path_keeps_nothing_of_what_came_after(tmp_path: Path) -> None:
    made(tmp_path, 1, 2, 3)
    progress = TrainingProgress(optimizer_steps=2, version=2, step_of_version={"0": 0, "1": 1, "2": 2})
    asynchronous = config(async_training={"staleness_threshold": 1})

    def limit() -> int:
        return work_to_keep(asynchronous, progress, 3, tmp_path).limit

    chosen(tmp_path, "auto")
    assert limit() == asynchronous.rule.max_required > 0
    chosen(tmp_path, str(tmp_path / "step_00000002"))
    assert limit() == 0
    chosen(tmp_path, str(tmp_path / "step_00000002"))  # it died before the ledger heard of it
    assert limit() == 0
    adopted(tmp_path)
    chosen(tmp_path, str(tmp_path / "step_00000002"))  # the next start has obeyed already
    assert limit() > 0


@pytest.mark.parametrize("name", ["step_00000009", "../elsewhere/step_00000002", "maybe"])
def test_a_path_that_is_no_checkpoint_of_the_run(tmp_path: Path, name: str) -> None:
    made(tmp_path, 1, 2)
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"no complete checkpoint of this run .*step_00000001"):
        chosen(tmp_path, str(tmp_path / name))
    assert len(list(tmp_path.glob("step_*"))) == 2


def test_a_resumed_optimizer_follows_the_configuration_of_now(tmp_path: Path, ranks: Ranks) -> None:
    """As the advice for a run whose updates are not finite has it: a lower rate, from an older checkpoint."""
    saved = training(0)
    path = Checkpoints(tmp_path, KEEPS_TWO, {"policy": saved}, ranks).save(TrainingProgress(step=3))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.3)
    now = Learnable(
        model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    )
    Checkpoints(tmp_path, KEEPS_TWO, {"policy": now}, ranks).load(path)
    assert now.schedule.last_epoch == saved.schedule.last_epoch == 1
    assert now.learning_rate == pytest.approx(1e-4 / 2)
    assert now.optimizer.param_groups[0]["weight_decay"] == 0.3
    now.schedule.step()
    assert now.learning_rate == pytest.approx(1e-4 / 3)
