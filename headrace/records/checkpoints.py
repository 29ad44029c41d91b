"""Read, write and verify the manifests of checkpoints.

`step_N/manifest.json` names the run, the lineage and the step, and holds every value that is not a tensor. It
lists the shard files with their sizes and SHA-256 digests, and has a digest of itself. The tensors are next
to it as safetensors. Reading a checkpoint executes no code.

The digests reveal damage and mistakes, not forgery: anyone who can write the folder can write new digests.
Even then only numbers are loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

RESUMED_FROM = "resumed_from"
"""File under `checkpoints/` with the `trainer.resume` that the trainer has already carried out."""
CHECKPOINT_MANIFEST = "manifest.json"

FORMAT = 2
"""The format of `Manifest`."""
PICKLED_FORMAT = 1
"""The format of earlier releases: torch DCP, whose metadata is a pickle."""
_CHUNK = 1 << 24
_DIGEST = "sha256"


class CheckpointError(ValueError):
    """A checkpoint that must not be used."""


class PickledCheckpoint(CheckpointError):
    """The checkpoint's metadata is a pickle. It was not read."""


class ShardFile(BaseModel):
    """Size and digest of a file of tensors, as written."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """`manifest.json`, the commit point of training: samples in it are trained whatever the ledger says."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[2] = 2
    run: str
    """The run's name."""
    run_id: str
    """Unique to this run, even among runs of the same name."""
    identity: dict[str, Any]
    """`headrace.config.identity.of` the configuration."""
    lineage: int
    step: int
    version: int
    """The last committed policy version."""
    trained: dict[str, int]
    """Sample id -> step that trained it."""
    progress: dict[str, Any]
    """The rest of the training loop's state."""
    ranks: int
    """Number of ranks that wrote it."""
    scalars: dict[str, Any]
    """State of models, optimizers and schedules that is not a tensor."""
    files: dict[str, ShardFile]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; it is on disk (fsync) when this returns."""
    plain = manifest.model_dump()
    with (folder / CHECKPOINT_MANIFEST).open("w") as handle:
        json.dump({**plain, _DIGEST: _digest_of(plain)}, handle)
        handle.flush()
        os.fsync(handle.fileno())


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and verify a checkpoint's manifest.

    Raises PickledCheckpoint for the old format; CheckpointError for any other format, or damage.
    """
    path = checkpoint / CHECKPOINT_MANIFEST
    try:
        text = path.read_text()
        plain = json.loads(text)
        found = plain["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if found == PICKLED_FORMAT:
        raise PickledCheckpoint(
            f"{checkpoint} was written by an earlier release (format {PICKLED_FORMAT}), with metadata in a "
            "pickle, which may run any code: finish the run with that release, or export its model with "
            "`headrace export RUN --out DIR --trust-pickle` and begin another run with model.path=DIR"
        )
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found!r}, this release reads {FORMAT}: use the one that wrote it"
        )
    is_as_written = text == json.dumps(plain)
    if plain.pop(_DIGEST, None) != _digest_of(plain) or not is_as_written:
        raise CheckpointError(f"{path} is damaged: its content is not what was written")
    try:
        return Manifest.model_validate(plain)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _digest_of(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def describe_file(path: Path) -> ShardFile:
    """Size and digest of a file that was just written."""
    return ShardFile(bytes=path.stat().st_size, sha256=_sha256(path, lambda: None))


def _sha256(path: Path, alive: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            alive()
            digest.update(chunk)
    return digest.hexdigest()


def check_files(
    checkpoint: Path,
    manifest: Manifest,
    rank: int = 0,
    ranks: int = 1,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Check that the files are those that were written.

    `ranks` share the work: `rank` hashes every `ranks`th file, and all check names and sizes. `alive` is
    called between chunks. Raises CheckpointError, which names every file that differs.
    """
    problems = []
    there = {entry.name for entry in checkpoint.iterdir()} - {CHECKPOINT_MANIFEST}
    for name in sorted(there - manifest.files.keys()):
        problems.append(f"{checkpoint / name} does not belong there and was not read: remove it")
    for number, (name, written) in enumerate(sorted(manifest.files.items())):
        path = checkpoint / name
        if name not in there:
            problems.append(f"{path} is missing")
            continue
        try:
            if (size := path.stat().st_size) != written.bytes:
                problems.append(f"{path} has {size} bytes, {written.bytes} were written")
            elif number % ranks == rank and _sha256(path, alive) != written.sha256:
                problems.append(f"{path} is damaged: its SHA-256 is not that of what was written")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
    if problems:
        raise CheckpointError("; ".join(problems))


def check_belongs(
    checkpoint: Path, manifest: Manifest, run: str, trained: Iterable[Mapping[str, Any]]
) -> None:
    """Check that the run called `run` may resume from the checkpoint.

    `trained`: rows of the run's `trained.jsonl`, which record the sequence of lineages. Rows lost in a crash
    only make this check more lenient. Raises CheckpointError if the checkpoint belongs to another run, or to
    a history that the run has abandoned.
    """
    if manifest.run != run:
        raise CheckpointError(f"{checkpoint} is of the run {manifest.run!r}, not of {run!r}")
    starts = [row for row in trained if "from_step" in row]
    if any(row.get("run_id", manifest.run_id) != manifest.run_id for row in starts):
        raise CheckpointError(f"{checkpoint} is of another run that was called {run!r}, too")
    for row in starts:
        if row["lineage"] > manifest.lineage and row["from_step"] < manifest.step:
            raise CheckpointError(
                f"{checkpoint} was written by lineage {manifest.lineage}, whose steps after "
                f"{row['from_step']} were taken back by lineage {row['lineage']}: it is not of this run's "
                "history"
            )


def instead_of(
    checkpoint: Path, run: str, trained: Iterable[Mapping[str, Any]], alive: Callable[[], None] = lambda: None
) -> str:
    """Advice for a run that cannot resume from `checkpoint`. Reads older ones to name a usable one."""
    rows = list(trained)
    older = [c for c in complete_checkpoints(checkpoint.parent) if c.name < checkpoint.name]
    for found in reversed(older):
        try:
            manifest = read_manifest(found)
            check_belongs(found, manifest, run, rows)
            check_files(found, manifest, alive=alive)
        except CheckpointError:
            continue
        return (
            f"Put back what was there, or go back to the newest usable one with trainer.resume={found}: "
            "steps after it are trained again"
        )
    return "Put back what was there, or start over under another name: no older checkpoint is usable"


def complete_checkpoints(directory: Path) -> list[Path]:
    """The completely written checkpoints in `directory`, oldest first."""
    found = [d for d in directory.glob("step_*") if (d / CHECKPOINT_MANIFEST).exists()]
    return sorted(found, key=lambda d: int(d.name.removeprefix("step_")))


def checkpoint_at(directory: Path, wanted: Path) -> Path:
    """The complete checkpoint under `directory` that `wanted` points to. Raises ValueError."""
    there = complete_checkpoints(directory)
    for found in there:
        if found.resolve() == wanted.resolve():
            return found
    shown = ", ".join(map(str, there)) or "none"
    raise ValueError(
        f"trainer.resume: {wanted} is no complete checkpoint of this run (there are: {shown}); use auto, "
        "never or one of these. To begin with another run's weights, `headrace export` them and set "
        "model.path"
    )
