"""Checkpoints: each rank's shards, and a manifest of what was trained.

`checkpoints/step_N/` is written under a temporary name and renamed when complete, so a crash leaves the
previous checkpoint valid. The manifest is the commit point of training: the ids in it are trained, whatever
the ledger says.

Saving copies the state and returns. A thread writes the copy while training continues. The manifest describes
the moment when the state was copied, not the end of the write.

Before anything is loaded the whole checkpoint is verified (`headrace.records.checkpoints`); the ranks share
the work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from headrace.config import identity
from headrace.config.loading import ConfigError
from headrace.config.run import RunConfig
from headrace.records import trained_log
from headrace.records.checkpoints import (
    CheckpointError,
    Manifest,
    ShardFile,
    check_belongs,
    check_files,
    complete_checkpoints,
    describe_file,
    read_manifest,
    write_manifest,
)
from headrace.records.json_files import read_rows
from headrace.system import disk
from headrace_trainer.checkpoints.progress import TrainingProgress, progress_of
from headrace_trainer.checkpoints.shards import Reader, Shard, file_name, flattened, own_shard, with_scalars
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.optimize import Learnable

log = logging.getLogger("headrace.trainer.checkpoint")

_TURN_S = 5.0

T = TypeVar("T")


def _is_saved(checkpoint: Path, progress: TrainingProgress) -> bool:
    """Whether `checkpoint` holds exactly this step of this lineage."""
    try:
        there = read_manifest(checkpoint)
    except CheckpointError:
        return False
    return (there.lineage, there.step, there.version) == (progress.lineage, progress.step, progress.version)


class SaveFailed(RuntimeError):
    """A checkpoint could not be written."""


def _key(part: str, what: str) -> str:
    """Key in a checkpoint's state; the policy's keys are at the top level."""
    return what if part == "policy" else f"{part}/{what}"


class Checkpoints:
    def __init__(
        self, directory: Path, config: RunConfig, parts: Mapping[str, Learnable], ranks: Ranks
    ) -> None:
        """`directory`: in the run's directory. `parts`: the trained models by name, including `policy`."""
        self._directory = directory
        self._config = config
        self._parts = parts
        self._ranks = ranks
        self._limit_s = config.trainer.save_timeout_s
        self._writer: threading.Thread | None = None
        self._failure: SaveFailed | None = None

    def _state(self) -> dict[str, Any]:
        """The sharded state. Loading writes into it."""
        out: dict[str, Any] = {}
        for name, part in self._parts.items():
            model_state, optimizer_state = get_state_dict(part.model, part.optimizer)
            out[_key(name, "model")] = model_state
            out[_key(name, "optimizer")] = optimizer_state
            out[_key(name, "schedule")] = part.schedule.state_dict()
        return out

    @property
    def _rng_key(self) -> str:
        return f"rng/{self._ranks.rank}"

    def begin(self, progress: TrainingProgress) -> Path:
        """Copy the state and begin to write it; all ranks together. Waits for a save in progress.

        Raises SaveFailed when that one failed.
        """
        self.wait()
        final = self._directory / f"step_{progress.step:08d}"
        fresh = self._directory / f".step_{progress.step:08d}.tmp"
        if self._ranks.share(_is_saved(final, progress) if self._ranks.is_first else None):
            return final
        if self._ranks.is_first:
            for stale in self._directory.glob(".step_*.tmp"):  # left by an interrupted save
                shutil.rmtree(stale, ignore_errors=True)
            with disk.writing(fresh):
                fresh.mkdir(parents=True)
        self._ranks.share(None)
        tensors, scalars = flattened(self._state())
        shard = own_shard(tensors, self._ranks.is_first)
        shard.add(self._rng_key, torch.get_rng_state())
        plain = {
            "run": self._config.name,
            "identity": identity.of(self._config),
            **progress.for_manifest(),
            "ranks": self._ranks.world_size,
            "scalars": scalars,
        }
        self._writer = threading.Thread(
            target=self._write, args=(shard, plain, fresh, final), name="checkpoint", daemon=True
        )
        self._writer.start()
        return final

    def save(self, progress: TrainingProgress) -> Path:
        """`begin`, and wait until the checkpoint is on disk."""
        path = self.begin(progress)
        self.wait()
        return path

    def check(self) -> None:
        """Raises SaveFailed if a save has failed meanwhile."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait until no save is in progress on any rank. Raises SaveFailed, the same on every rank."""
        if self._writer is not None:
            deadline = time.monotonic() + self._limit_s
            while self._writer.is_alive() and (left := deadline - time.monotonic()) > 0:
                heartbeat.beat()
                self._writer.join(min(_TURN_S, left))
            if self._writer.is_alive():
                self._failure = SaveFailed(f"a checkpoint was not written within {self._limit_s:g} s")
            self._writer = None
        for failure in self._ranks.gather_all(str(self._failure) if self._failure else None):
            if failure is not None:
                raise SaveFailed(failure)

    def _write(self, shard: Shard, plain: dict[str, Any], fresh: Path, final: Path) -> None:
        """Write in a thread. Once every rank's shard is written, rank 0 makes the checkpoint valid."""
        try:
            files = self._write_shards(shard, fresh)
            if self._ranks.is_first:
                self._publish(Manifest(**plain, files=files), fresh, final)
        except Exception as error:  # kept for `check` and `wait`: the training loop raises it
            if (no_room := disk.full(error, final, shard.nbytes)) is not None:
                self._failure = SaveFailed(f"the checkpoint {no_room}")
            else:
                log.exception("checkpoint failed")
                self._failure = SaveFailed(f"the checkpoint {final} could not be written: {error!r}")
            if self._ranks.is_first:  # half a checkpoint is useless and takes up space
                shutil.rmtree(fresh, ignore_errors=True)

    def _write_shards(self, shard: Shard, fresh: Path) -> dict[str, ShardFile]:
        """Write this rank's shard. Returns all ranks' files by name. Raises OSError on every rank."""
        mine = fresh / file_name(self._ranks.rank)
        told: dict[str, Any] = {"name": mine.name}
        try:
            shard.write(mine)
            told["file"] = describe_file(mine).model_dump()
        except Exception as error:  # tell the other ranks, or they wait for this one
            if disk.full(error, mine) is None:
                log.exception("shard not written", extra={"path": str(mine)})
            told["error"] = f"{mine}: {error}"
        every = self._ranks.gather_saved(told)
        if errors := [t["error"] for t in every if "error" in t]:
            raise OSError("; ".join(errors))
        return {t["name"]: ShardFile(**t["file"]) for t in every}

    def _publish(self, manifest: Manifest, fresh: Path, final: Path) -> None:
        """Make the checkpoint valid. Raises SaveFailed if a successor has taken over unnoticed: this trainer
        must neither replace the successor's checkpoints nor remove any."""
        others = self._others()  # read once: a manifest names every sample trained up to it
        for name, other in others.items():
            if other.lineage > manifest.lineage:
                raise SaveFailed(
                    f"lineage {other.lineage} has saved {self._directory / name}: this trainer's is "
                    f"{manifest.lineage}, and over"
                )
        write_manifest(fresh, manifest)
        _sync_directory(fresh)
        if final.exists():  # the same step, retrained after a resume from an older checkpoint
            final.rename(self._directory / f".{final.name}.old.tmp")
        fresh.rename(final)
        # A trainer stopped in the middle of a save may have completed it after its successor began. That step
        # belongs to a history that the run has abandoned, and would pass for the newest.
        late = [n for n, o in others.items() if o.step > manifest.step and o.lineage < manifest.lineage]
        if late:
            set_aside(self._directory, late)
        _sync_directory(self._directory)
        for old in complete_checkpoints(self._directory)[: -self._config.trainer.max_ckpt_to_keep]:
            shutil.rmtree(old)
        log.info("checkpoint saved", extra={"path": str(final), "step": manifest.step})

    def _others(self) -> dict[str, Manifest]:
        """Manifests of the existing checkpoints. One without a readable manifest is left out."""
        found = {}
        for checkpoint in complete_checkpoints(self._directory):
            with contextlib.suppress(CheckpointError):
                found[checkpoint.name] = read_manifest(checkpoint)
        return found

    def load(self, checkpoint: Path) -> TrainingProgress:
        """All ranks together, on any number of ranks.

        Raises CheckpointError on every rank when the checkpoint is damaged, belongs to another run or to a
        history that the run has abandoned. Raises ConfigError when it was made with another model, for
        example. Nothing has been loaded then, unless a tensor turns out not to fit during loading.
        """
        manifest = self._all_agree(lambda: self._verified(checkpoint))
        heartbeat.beat(heartbeat.LONG_S)
        state = self._all_agree(lambda: self._read(checkpoint, manifest))
        for name, part in self._parts.items():
            set_state_dict(
                part.model,
                part.optimizer,
                model_state_dict=state[_key(name, "model")],
                optim_state_dict=state[_key(name, "optimizer")],
            )
            part.schedule.load_state_dict(state[_key(name, "schedule")])
            part.follow_configuration()
        if self._rng_key in state:
            torch.set_rng_state(state[self._rng_key])
        log.info("checkpoint loaded", extra={"path": str(checkpoint), "step": manifest.step})
        return progress_of(manifest)

    def _verified(self, checkpoint: Path) -> Manifest:
        manifest = read_manifest(checkpoint)
        check_belongs(checkpoint, manifest, self._config.name, trained_rows(self._directory))
        if changed := identity.changes(json.dumps(manifest.identity), self._config):
            raise ConfigError(changed)
        progress_of(manifest)
        check_files(checkpoint, manifest, self._ranks.rank, self._ranks.world_size, heartbeat.beat)
        return manifest

    def _read(self, checkpoint: Path, manifest: Manifest) -> dict[str, Any]:
        """This rank's part of the state."""
        state = self._state()
        if self._ranks.rank < manifest.ranks:  # the checkpoint may have fewer ranks
            state[self._rng_key] = torch.get_rng_state()
        tensors, _ = flattened(state)
        try:
            restored: dict[str, Any] = with_scalars(state, manifest.scalars)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint} does not fit this run: {error}") from error
        Reader(checkpoint).load(tensors)
        return restored

    def _all_agree(self, work: Callable[[], T]) -> T:
        """The result of `work` on this rank. Raises CheckpointError if `work` does so on any rank."""
        done: list[T] = []
        problem = None
        try:
            done.append(work())
        except CheckpointError as error:
            problem = str(error)
        if problems := [p for p in self._ranks.gather_all(problem) if p is not None]:
            raise CheckpointError("; ".join(dict.fromkeys(problems)))
        return done[0]

    def full_state(self) -> dict[str, torch.Tensor]:
        """Full parameters on rank 0's host memory, an empty dictionary elsewhere. All ranks together."""
        heartbeat.beat(heartbeat.LONG_S)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._parts["policy"].model, options=options)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def set_aside(directory: Path, names: list[str]) -> None:
    """Rename checkpoints so that they no longer count as checkpoints. Nothing is deleted."""
    for name in names:
        number = 1
        while (aside := directory / f"aside_{number}_{name}").exists():
            number += 1
        (directory / name).rename(aside)
        log.info("checkpoint set aside", extra={"was": name, "is": aside.name})


def trained_rows(directory: Path) -> list[dict[str, Any]]:
    """Rows on trained samples, of the run whose checkpoints are in `directory`."""
    return read_rows(directory.parent / trained_log.FILE)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
