"""Checkpoints: sharded state by torch DCP, and a manifest of what was trained.

`checkpoints/step_N/` is written under another name and renamed when it is complete, so a crash leaves
the previous one valid. The manifest is the commit point of training: ids in it are trained whatever
the ledger says.

Saving copies the state and returns; a thread writes it while training goes on. What the manifest says is
what was true when the state was copied, not when the writing ended.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from headrace import disk
from headrace.runner.layout import CHECKPOINT_MANIFEST as MANIFEST
from headrace.runner.layout import complete_checkpoints
from headrace_trainer import heartbeat
from headrace_trainer.optimize import Learnable
from headrace_trainer.ranks import Ranks

log = logging.getLogger("headrace.trainer.checkpoint")

FORMAT = 1
_TURN_S = 5.0


@dataclass
class Progress:
    """What the training loop itself remembers; the rest is in the model and the optimizer."""

    step: int = 0
    """Local updates so far (claims of R*M samples)."""
    optimizer_steps: int = 0
    version: int = -1
    """Policy version committed last."""
    lineage: int = 0
    tokens: int = 0
    """Response tokens trained."""
    trajectories: int = 0
    stale_samples: int = 0
    stale_trajectories: int = 0
    partial_samples: int = 0
    wall_s: float = 0.0
    """Seconds of training over all incarnations up to here."""
    trained: dict[str, int] = field(default_factory=dict)
    """Sample id -> step that trained it."""
    step_of_version: dict[str, int] = field(default_factory=dict)
    """Policy version -> optimizer steps before its snapshot."""
    snapshot: int = -1
    """The version that these weights were about to become, when this was saved between two windows."""
    kl_coef: float | None = None
    """Of the KL divergence in the reward, as the controller left it."""

    def origin(self, version: int) -> tuple[int, int]:
        """The newest committed version that these weights come after, and the windows of training between the
        two. `version`: committed last, perhaps by others. A snapshot that had not committed when this was
        saved may have left its number to another."""
        known = sorted(map(int, self.step_of_version))
        parent = max((v for v in known if v <= min(version, self.version)), default=min(version, 0))
        steps = self.step_of_version.get(str(known[-1]), 0) if known else 0
        return parent, sum(v > parent for v in known) + (self.optimizer_steps > steps)

    def count_lost(self, version: int, window_steps: int) -> None:
        """Place the versions up to `version`, committed last, that a lost trainer made after these weights.

        A policy that was l optimizer steps ahead is as far from what is trained now as one that is l steps
        behind, so it counts as that. `window_steps`: optimizer steps of a window.
        """
        if version < 0:
            return
        parent, _ = self.origin(version)
        begun = self.step_of_version.setdefault(str(parent), 0)  # missing: the initial weights
        for lost in range(parent + 1, version + 1):
            ahead = begun + (lost - parent) * window_steps - self.optimizer_steps
            self.step_of_version[str(lost)] = self.optimizer_steps - max(0, ahead)


def read_manifest(checkpoint: Path) -> Progress:
    """Raises ValueError when it is damaged or of another format."""
    try:
        plain = json.loads((checkpoint / MANIFEST).read_text())
        if plain.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        return Progress(**plain)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint / MANIFEST}: {error}") from error


def _is_saved(checkpoint: Path, progress: Progress) -> bool:
    """Whether `checkpoint` holds exactly this step of this lineage."""
    try:
        there = read_manifest(checkpoint)
    except ValueError:
        return False
    return (there.lineage, there.step, there.version) == (progress.lineage, progress.step, progress.version)


class SaveFailed(RuntimeError):
    """A checkpoint could not be written."""


def _key(part: str, what: str) -> str:
    """In a checkpoint's state; the policy's stands at the top."""
    return what if part == "policy" else f"{part}/{what}"


class Checkpoints:
    def __init__(
        self,
        directory: Path,
        keep: int,
        parts: Mapping[str, Learnable],
        ranks: Ranks,
        limit_s: float = 1800.0,
    ) -> None:
        """`parts`: what is trained, by name; `policy` is one of them. `limit_s`: longest writing."""
        self._directory = directory
        self._keep = keep
        self._parts = parts
        self._ranks = ranks
        self._limit_s = limit_s
        self._writer: threading.Thread | None = None
        self._failure: SaveFailed | None = None

    def _state(self) -> dict[str, Any]:
        """Sharded, and where `dcp.load` writes to."""
        out: dict[str, Any] = {}
        for name, part in self._parts.items():
            model_state, optimizer_state = get_state_dict(part.model, part.optimizer)
            out[_key(name, "model")] = model_state
            out[_key(name, "optimizer")] = optimizer_state
            out[_key(name, "schedule")] = part.schedule.state_dict()
        out[self._rng_key] = torch.get_rng_state()
        return out

    @property
    def _rng_key(self) -> str:
        return f"rng/{self._ranks.rank}"

    def begin(self, progress: Progress) -> Path:
        """Copy the state and begin to write it; all ranks together. Waits for a save that is under way.

        Raises SaveFailed when that one failed.
        """
        self.wait()
        final = self._directory / f"step_{progress.step:08d}"
        fresh = self._directory / f".step_{progress.step:08d}.tmp"
        if self._ranks.share(_is_saved(final, progress) if self._ranks.is_first else None):
            return final
        if self._ranks.is_first:
            for stale in self._directory.glob(".step_*.tmp"):  # of a save that was cut off
                shutil.rmtree(stale, ignore_errors=True)
            with disk.writing(fresh):
                fresh.mkdir(parents=True)
        self._ranks.share(None)
        plain = {"format": FORMAT, **asdict(progress)}
        state = self._state()
        upload = dcp.async_save(state, checkpoint_id=fresh, process_group=self._ranks.saving)
        args = (upload, plain, fresh, final, _bytes(state))
        self._writer = threading.Thread(target=self._write, args=args, name="checkpoint", daemon=True)
        self._writer.start()
        return final

    def save(self, progress: Progress) -> Path:
        """`begin`, and wait until the checkpoint is on disk."""
        path = self.begin(progress)
        self.wait()
        return path

    def check(self) -> None:
        """Raises SaveFailed when a save has failed meanwhile."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Until no save is under way, on any rank. Raises SaveFailed, on every rank alike."""
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

    def _write(
        self, upload: Future[Any], plain: dict[str, Any], fresh: Path, final: Path, needed: int
    ) -> None:
        """In a thread: once every rank's shards are there, rank 0 makes the checkpoint valid."""
        try:
            upload.result(self._limit_s)
            if self._ranks.is_first:
                self._publish(plain, fresh, final)
        except (Exception, CheckpointException) as error:  # torch's own is no Exception
            # Kept for `check` and `wait`: the training loop raises it.
            if (no_room := disk.full(error, final, needed)) is not None:
                self._failure = SaveFailed(f"the checkpoint {no_room}")
            else:
                log.exception("checkpoint failed")
                self._failure = SaveFailed(f"the checkpoint {final} could not be written: {error!r}")
            if self._ranks.is_first:  # half of one is of no use to anybody, and takes up what others need
                shutil.rmtree(fresh, ignore_errors=True)

    def _publish(self, plain: dict[str, Any], fresh: Path, final: Path) -> None:
        with (fresh / MANIFEST).open("w") as handle:
            json.dump(plain, handle)
            handle.flush()
            os.fsync(handle.fileno())
        if final.exists():  # the same step, trained again after a resume from an older checkpoint
            final.rename(self._directory / f".{final.name}.old.tmp")
        fresh.rename(final)
        _sync_directory(self._directory)
        for old in complete_checkpoints(self._directory)[: -self._keep]:
            shutil.rmtree(old)
        log.info("checkpoint saved", extra={"path": str(final), "step": plain["step"]})

    def load(self, checkpoint: Path) -> Progress:
        """All ranks together, on any number of ranks. Raises ValueError when it cannot be read."""
        heartbeat.beat(heartbeat.LONG_S)
        progress = read_manifest(checkpoint)
        state = self._state()
        try:
            known = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        except Exception as error:  # whatever the reader makes of a damaged file
            raise ValueError(f"{checkpoint}: its metadata cannot be read: {error!r}") from error
        if self._rng_key not in known:  # saved by fewer ranks
            del state[self._rng_key]
        try:
            dcp.load(state, checkpoint_id=checkpoint, process_group=self._ranks.control)
        except CheckpointException as error:
            raise ValueError(f"{checkpoint} does not fit this run: {error}") from error
        for name, part in self._parts.items():
            set_state_dict(
                part.model,
                part.optimizer,
                model_state_dict=state[_key(name, "model")],
                optim_state_dict=state[_key(name, "optimizer")],
            )
            part.schedule.load_state_dict(state[_key(name, "schedule")])
        if self._rng_key in state:
            torch.set_rng_state(state[self._rng_key])
        log.info("checkpoint loaded", extra={"path": str(checkpoint), "step": progress.step})
        return progress

    def full_state(self) -> dict[str, torch.Tensor]:
        """Full parameters on rank 0's host memory, an empty dictionary elsewhere. All ranks together."""
        heartbeat.beat(heartbeat.LONG_S)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._parts["policy"].model, options=options)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _bytes(state: Any) -> int:
    """Of all tensors in it, on all ranks together."""
    leaves = torch.utils._pytree.tree_leaves(state)
    return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
