"""A checkpoint executes nothing, and is loaded only when it is whole, of this run and of its history."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from headrace.cli.export import export
from headrace.cli.run import run
from headrace.config import loading
from headrace.config.loading import ConfigError
from headrace.records.checkpoints import CHECKPOINT_MANIFEST as MANIFEST
from headrace.records.checkpoints import (
    CheckpointError,
    Manifest,
    PickledCheckpoint,
    check_files,
    describe_file,
    instead_of,
    read_manifest,
    write_manifest,
)
from headrace.records.trained_log import TrainedLog
from headrace_trainer.checkpoints import export as trainer_export
from headrace_trainer.checkpoints.checkpoint import Checkpoints, SaveFailed, trained_rows
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.checkpoints.resume import chosen, run_id
from headrace_trainer.checkpoints.shards import Shard, file_name, flattened, with_scalars
from headrace_trainer.distributed.ranks import Ranks
from tests.support.learners import config, training

CONFIG = config(trainer={"max_ckpt_to_keep": 9})
SHARD = file_name(0)
SEED = random.SystemRandom().randrange(1 << 32)


class Evil:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@dataclasses.dataclass
class World:
    """A run's directory with checkpoints of steps 1 and 2, of lineage 1."""

    root: Path
    checkpoints: Checkpoints

    @property
    def folder(self) -> Path:
        return self.root / "checkpoints"

    @property
    def newest(self) -> Path:
        return self.folder / "step_00000002"

    @property
    def older(self) -> Path:
        return self.folder / "step_00000001"

    @property
    def mark(self) -> Path:
        return self.root / "code-was-run"

    def refused(self, path: Path | None = None) -> str:
        with pytest.raises(CheckpointError) as told:
            self.checkpoints.load(path or self.newest)
        return str(told.value)

    def exported(self, capsys: pytest.CaptureFixture[str]) -> str:
        """What the command says, which fails."""
        assert export(self.root.name, self.root.parent, None, self.root / "model") == 1
        assert not (self.root / "model").exists()
        return capsys.readouterr().err

    def begins(self, *starts: tuple[int, int], run: str = "r") -> None:
        log = TrainedLog(self.root)
        for lineage, step in starts:
            log.began(lineage, step, version=-1, run_id=run)
        log.close()


@pytest.fixture
def world(tmp_path: Path, ranks: Ranks) -> World:
    root = tmp_path / CONFIG.name
    made = World(root, Checkpoints(root / "checkpoints", CONFIG, {"policy": training(0)}, ranks))
    for step in (1, 2):
        made.checkpoints.save(progress(step))
    loading.write(CONFIG, root / "config.yaml")
    return made


def progress(step: int, lineage: int = 1, run: str = "r") -> TrainingProgress:
    return TrainingProgress(run_id=run, step=step, lineage=lineage, trained={f"{step:010d}": step})


def described_anew(checkpoint: Path, **changes: Any) -> None:
    """As somebody would who may write there: a manifest with true digests of whatever lies there."""
    old = read_manifest(checkpoint)
    files = {p.name: describe_file(p) for p in checkpoint.iterdir() if p.name != MANIFEST}
    write_manifest(checkpoint, Manifest.model_validate({**old.model_dump(), "files": files, **changes}))


# -- nothing is executed -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [".metadata", SHARD])
@pytest.mark.parametrize("has_true_digests", [False, True])
def test_a_pickle_in_a_checkpoint_is_never_read(
    where: str, has_true_digests: bool, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == SHARD:
        torch.save({"model.0.weight": Evil(world.mark)}, world.newest / where)
    else:
        (world.newest / where).write_bytes(pickle.dumps(Evil(world.mark)))
    if has_true_digests:
        described_anew(world.newest)
    if where == ".metadata" and has_true_digests:
        world.checkpoints.load(world.newest)  # a file that nobody opens
    else:
        assert where in world.refused() or "cannot be read" in world.refused()
        assert str(world.newest) in world.exported(capsys)
    assert not world.mark.exists()


def earlier_release(checkpoint: Path, metadata: bytes | None = None) -> torch.nn.Module:
    """A checkpoint of format 1 in place of the one that is there; returns its policy."""
    shutil.rmtree(checkpoint)
    part = training(3)
    model, optimizer = get_state_dict(part.model, part.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint, no_dist=True)
    (checkpoint / MANIFEST).write_text(json.dumps({"format": 1, "step": 2, "lineage": 1, "trained": {}}))
    if metadata is not None:
        (checkpoint / ".metadata").write_bytes(metadata)
    return part.model


def test_a_checkpoint_of_an_earlier_release_needs_to_be_trusted(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its metadata is a pickle. The refusal says what leads on, and that does."""
    model = earlier_release(world.newest)
    assert "--trust-pickle" in world.refused()
    assert "--trust-pickle" in world.exported(capsys)
    saved: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(trainer_export, "export_model", lambda config, state, out: saved.update(state))
    assert export(world.root.name, tmp_path, None, tmp_path / "out", trust_pickle=True) == 0
    assert saved.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert torch.equal(saved[name], p)


def test_the_pickle_of_an_earlier_release_is_run_by_those_who_trust_it_alone(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier_release(world.newest, pickle.dumps(Evil(world.mark)))
    with pytest.raises(PickledCheckpoint):
        trainer_export.export_checkpoint(CONFIG, world.newest, world.root / "model")
    world.refused()
    world.exported(capsys)
    assert not world.mark.exists()
    with pytest.raises(CheckpointError):
        trainer_export.export_checkpoint(CONFIG, world.newest, world.root / "model", trust_pickle=True)
    assert world.mark.exists(), "the attack is none"


@pytest.fixture
def no_pickles() -> Iterator[None]:
    """Whoever unpickles anything, also in a collective of objects, fails."""
    c10d = "torch.distributed.distributed_c10d"
    with (
        mock.patch(f"{c10d}._object_to_tensor", side_effect=AssertionError("a collective of objects")),
        mock.patch(f"{c10d}._tensor_to_object", side_effect=AssertionError("a collective of objects")),
        mock.patch("pickle.load", side_effect=AssertionError("pickle.load")),
        mock.patch("pickle.loads", side_effect=AssertionError("pickle.loads")),
        mock.patch("torch.load", side_effect=AssertionError("torch.load")),
        mock.patch("torch.save", side_effect=AssertionError("torch.save")),
    ):
        yield


@pytest.mark.usefixtures("no_pickles")
def test_saving_loading_and_exporting_pickle_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(trainer_export, "export_model", lambda config, state, out: saved.update(state))
    world.checkpoints.save(progress(3))
    assert world.checkpoints.load(world.folder / "step_00000003") == progress(3)
    assert export(world.root.name, world.root.parent, 3, world.root / "out") == 0
    assert set(saved) == {"0.weight", "0.bias", "1.weight", "1.bias"}


# -- whole ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda c: (c / SHARD).unlink(), f"{SHARD} is missing"),
        (
            lambda c: os.truncate(c / SHARD, 99),
            rf"{SHARD} has 99 bytes, \d+ were written",
        ),
        (
            lambda c: (c / "more.safetensors").touch(),
            "more.safetensors does not belong there and was not read: remove",
        ),
        (lambda c: (c / MANIFEST).write_text('{"format": 2, "step"'), "manifest.json is damaged"),
        (lambda c: (c / MANIFEST).write_text('{"format": 3}'), "manifest.json has format 3"),
        (lambda c: (c / MANIFEST).write_text("[]"), "manifest.json is damaged"),
    ],
)
def test_what_is_not_whole_is_named(
    damage: Any, told: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = training(0)
    damage(world.newest)
    said = world.refused()
    assert re.search(told, said), said
    assert str(world.newest) in said
    part = world.checkpoints._parts["policy"]
    for p, q in zip(part.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(p, q), "something was loaded"
    said = world.exported(capsys)
    assert re.search(told, said), said
    assert "--step" in said


def test_no_bit_may_flip(world: World) -> None:
    """In whichever file: each flip is found before anything is loaded, and the file is named."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(300):
        path = world.newest / rng.choice([SHARD, MANIFEST])
        whole = path.read_bytes()
        at, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=re.escape(path.name)):
            check_files(world.newest, read_manifest(world.newest))
        path.write_bytes(whole)
    check_files(world.newest, read_manifest(world.newest))


def test_ranks_share_the_reading_and_leave_nothing_out(world: World) -> None:
    for number in range(1, 5):
        shutil.copy(world.newest / SHARD, world.newest / file_name(number))
    described_anew(world.newest)
    manifest = read_manifest(world.newest)
    for number in range(5):
        path = world.newest / file_name(number)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        found = []
        for rank in range(3):
            try:
                check_files(world.newest, manifest, rank, 3)
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1, "no rank, or several, have read it"
        assert path.name in found[0]
        path.write_bytes(whole)


def test_the_remedy_names_one_that_serves_and_it_does(world: World) -> None:
    (world.newest / SHARD).write_bytes(b"")
    world.refused()
    told = instead_of(world.newest, CONFIG.name, [])
    (path,) = re.findall(r"trainer\.resume=(\S+):", told)
    assert path == str(world.older)
    assert chosen(world.folder, path) == world.older.name
    assert world.checkpoints.load(world.older) == progress(1)
    assert chosen(world.folder, "auto") == world.older.name, "the damaged one would be taken again"
    (world.older / SHARD).unlink()
    assert "no older checkpoint is usable" in instead_of(world.older, CONFIG.name, [])


# -- of this run ---------------------------------------------------------------------------------------


def test_another_runs_checkpoint_is_refused(world: World, tmp_path: Path, ranks: Ranks) -> None:
    other = CONFIG.model_copy(update={"name": "other"})
    parts = {"policy": training(1)}
    Checkpoints(world.folder, other, parts, ranks).save(progress(3))
    assert f"is of the run 'other', not of '{CONFIG.name}'" in world.refused(world.folder / "step_00000003")
    world.begins((1, 0), run="the one that began here")
    assert "another run that was called" in world.refused()
    described_anew(world.newest, run_id="the one that began here")
    assert world.checkpoints.load(world.newest).step == 2
    described_anew(world.newest, identity={"seed": CONFIG.seed + 1})
    with pytest.raises(ConfigError, match="seed: was"):
        world.checkpoints.load(world.newest)


def test_a_run_keeps_its_id(world: World) -> None:
    assert run_id(world.folder, progress(1, run="saved")) == "saved"
    world.begins((1, 0), run="begun")
    assert run_id(world.folder, TrainingProgress()) == "begun", "it went before its first checkpoint"
    (world.root / "trained.jsonl").unlink()
    one, other = run_id(world.folder, TrainingProgress()), run_id(world.folder, TrainingProgress())
    assert one != other


def test_a_step_of_a_history_that_was_left_is_refused(world: World) -> None:
    """Lineage 1 went on to step 9; lineage 2 went back to its step 2, and lineage 3 to step 5 of that."""
    world.begins((1, 0), (2, 2), (3, 5))
    world.checkpoints.save(progress(9, lineage=1))
    assert chosen(world.folder, "auto") == "step_00000009"
    said = world.refused(world.folder / "step_00000009")
    assert "lineage 1, whose steps after 2 were taken back by lineage 2" in said
    told = instead_of(world.folder / "step_00000009", CONFIG.name, trained_rows(world.folder))
    assert f"trainer.resume={world.newest}" in told
    assert world.checkpoints.load(world.newest) == progress(2), "step 2 is common to all"
    for lineage, step, is_ours in [(1, 3, False), (2, 5, True), (2, 6, False), (3, 6, True), (4, 7, True)]:
        path = world.checkpoints.save(progress(step, lineage))
        if is_ours:
            assert world.checkpoints.load(path) == progress(step, lineage)
        else:
            assert "not of this run's history" in world.refused(path)


def test_who_was_followed_leaves_the_checkpoints_alone(world: World) -> None:
    """A trainer that has not heard of its successor saves when it is told to stop."""
    world.checkpoints.save(progress(3, lineage=2))
    before = {path: path.stat().st_mtime_ns for path in world.folder.rglob("*.*")}
    for step in (3, 4):
        with pytest.raises(SaveFailed, match=r"lineage 2 has saved \S*step_00000003"):
            world.checkpoints.save(progress(step, lineage=1))
        world.checkpoints._failure = None
    after = {path: path.stat().st_mtime_ns for path in world.folder.rglob("*.*")}
    assert {path: after.get(path) for path in before} == before
    assert chosen(world.folder, "auto") == "step_00000003"


def test_a_run_says_so_before_it_starts(world: World, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    plain = CONFIG.model_dump(mode="json") | {"runs_dir": str(tmp_path)}
    file.write_text(json.dumps(plain))
    world.begins((1, 0), (2, 1))
    with (
        mock.patch("headrace.cli.run._check", side_effect=AssertionError("it went on")),
        pytest.raises(ConfigError, match=r"not of this run's history.*trainer\.resume=\S*step_00000001"),
    ):
        run(file, [])
    with (
        mock.patch("headrace.cli.run._check", side_effect=AssertionError("it went on")),
        pytest.raises(AssertionError, match="it went on"),
    ):
        run(file, [f"trainer.resume={world.older}"])


# -- trees ---------------------------------------------------------------------------------------------


def test_a_tree_comes_back_with_its_types() -> None:
    tree = {
        "a": {"b": (0.9, 0.999), "c": None, "d": [1, 2]},
        "e": [{"lr": 0.1}, {"lr": 0.2}],
        "t": torch.ones(1),
    }
    tensors, scalars = flattened(tree)
    assert tensors.keys() == {"t"}
    back = with_scalars(tree, json.loads(json.dumps(scalars)))
    assert back == tree
    assert isinstance(back["a"]["b"], tuple)
    del scalars["e.1.lr"]
    with pytest.raises(CheckpointError, match=r"e\.1\.lr"):
        with_scalars(tree, scalars)
    with pytest.raises(TypeError, match=r"a\.b: a checkpoint keeps no function"):
        flattened({"a": {"b": lambda: 1}})
    with pytest.raises(TypeError, match=r"two values of the state are called a\.b"):
        flattened({"a": {"b": 1}, "a.b": 2})


def test_a_shard_that_cannot_be_written_leaves_no_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shard, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SaveFailed, match="step_00000003 cannot be written: No space left"):
        world.checkpoints.save(progress(3))
    assert chosen(world.folder, "auto") == world.newest.name
