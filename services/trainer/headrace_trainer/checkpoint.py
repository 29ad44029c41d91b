"""Checkpoints: sharded state by torch DCP, and a manifest of what was trained.

`checkpoints/step_N/` is written under another name and renamed when it is complete, so a crash leaves
the previous one valid. The manifest is the commit point of training: ids in it are trained whatever
the ledger says.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from headrace_trainer.optimize import Learnable
from headrace_trainer.ranks import Ranks

log = logging.getLogger("headrace.trainer.checkpoint")

MANIFEST = "manifest.json"
FORMAT = 1


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
    kl_coef: float | None = None
    """Of the KL divergence in the reward, as the controller left it."""


def newest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = [d for d in directory.glob("step_*") if (d / MANIFEST).exists()]
    return max(found, key=lambda d: int(d.name.removeprefix("step_")), default=None)


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
    ) -> None:
        """`parts`: what is trained, by name; `policy` is one of them."""
        self._directory = directory
        self._keep = keep
        self._parts = parts
        self._ranks = ranks

    def _state(self) -> dict[str, Any]:
        """Sharded, and where `dcp.load` writes to."""
        out: dict[str, Any] = {}
        for name, part in self._parts.items():
            model_state, optimizer_state = get_state_dict(part.model, part.optimizer)
            out[_key(name, "model")] = model_state
            out[_key(name, "optimizer")] = optimizer_state
            out[_key(name, "schedule")] = part.schedule.state_dict()
        return out

    def save(self, progress: Progress) -> Path:
        """All ranks together. When it returns the checkpoint is on disk."""
        final = self._directory / f"step_{progress.step:08d}"
        fresh = self._directory / f".step_{progress.step:08d}.tmp"
        if self._ranks.share(_is_saved(final, progress) if self._ranks.is_first else None):
            return final
        if self._ranks.is_first:
            for stale in self._directory.glob(".step_*.tmp"):  # of a save that was cut off
                shutil.rmtree(stale, ignore_errors=True)
            fresh.mkdir(parents=True)
        self._ranks.share(None)
        dcp.save(self._state(), checkpoint_id=fresh, process_group=self._ranks.control)
        if self._ranks.is_first:
            plain = {"format": FORMAT, **asdict(progress)}
            with (fresh / MANIFEST).open("w") as handle:
                json.dump(plain, handle)
                handle.flush()
                os.fsync(handle.fileno())
            if final.exists():  # the same step, trained again after a resume from an older checkpoint
                aside = self._directory / f".step_{progress.step:08d}.old.tmp"
                final.rename(aside)
            fresh.rename(final)
            _sync_directory(self._directory)
            self._retain()
        self._ranks.share(None)
        return final

    def load(self, checkpoint: Path) -> Progress:
        """All ranks together, on any number of ranks. Raises ValueError when it cannot be read."""
        progress = read_manifest(checkpoint)
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=checkpoint, process_group=self._ranks.control)
        except dcp.api.CheckpointException as error:
            raise ValueError(f"{checkpoint} does not fit this run: {error}") from error
        for name, part in self._parts.items():
            set_state_dict(
                part.model,
                part.optimizer,
                model_state_dict=state[_key(name, "model")],
                optim_state_dict=state[_key(name, "optimizer")],
            )
            part.schedule.load_state_dict(state[_key(name, "schedule")])
        log.info("checkpoint loaded", extra={"path": str(checkpoint), "step": progress.step})
        return progress

    def full_state(self) -> dict[str, torch.Tensor]:
        """Full parameters on rank 0's host memory, an empty dictionary elsewhere. All ranks together."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._parts["policy"].model, options=options)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}

    def _retain(self) -> None:
        complete = sorted(d for d in self._directory.glob("step_*") if (d / MANIFEST).exists())
        for old in complete[: -self._keep]:
            shutil.rmtree(old)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
