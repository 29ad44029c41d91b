"""A checkpoint as a Hugging Face model, without a process group and without the optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from headrace.checkpoints import CheckpointError, PickledCheckpoint, check_files, read_manifest
from headrace.config import RunConfig
from headrace_trainer.policy import export_model
from headrace_trainer.shards import Reader

_POLICY = "model."


def export_checkpoint(config: RunConfig, checkpoint: Path, out: Path, trust_pickle: bool = False) -> None:
    """Write the policy of `checkpoint`, of whichever run, to `out`. Its digests are verified first.

    `trust_pickle`: also of an earlier release, whose metadata is a pickle and may run any code. Raises
    CheckpointError when the checkpoint cannot be used.
    """
    try:
        check_files(checkpoint, read_manifest(checkpoint))
        reader = Reader(checkpoint)
        state = reader.empty(_POLICY)
        reader.load(state)
    except PickledCheckpoint:
        if not trust_pickle:
            raise
        state = _unpickled(checkpoint)
    if not state:
        raise CheckpointError(f"{checkpoint} holds no policy")
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()  # an empty one; the export renames its own into place
    export_model(config, {key.removeprefix(_POLICY): tensor for key, tensor in state.items()}, out)


def _unpickled(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The policy in a checkpoint of an earlier release. Whatever its metadata says is executed."""
    try:
        known = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        state = {
            key: torch.empty(found.size, dtype=found.properties.dtype)
            for key, found in known.items()
            if key.startswith(_POLICY) and isinstance(found, TensorStorageMetadata)
        }
        if state:
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    except (Exception, dcp.api.CheckpointException) as error:  # whatever the reader makes of a damaged file
        raise CheckpointError(f"{checkpoint} cannot be read: {error!r}") from error
    return state
