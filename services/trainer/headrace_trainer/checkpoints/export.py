"""A checkpoint as a Hugging Face model, without a process group and without the optimizer."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from headrace.config.run import RunConfig
from headrace.records.checkpoints import CheckpointError, PickledCheckpoint, check_files, read_manifest
from headrace_trainer.checkpoints.shards import Reader
from headrace_trainer.model.policy import export_model

_POLICY = "model."


def export_checkpoint(config: RunConfig, checkpoint: Path, out: Path, trust_pickle: bool = False) -> None:
    """Write the policy of `checkpoint`, of any run, to `out`. Its digests are verified first.

    `trust_pickle`: also accept a checkpoint of an earlier release, whose metadata is a pickle and may run any
    code. Raises CheckpointError when the checkpoint cannot be used.
    """
    storage = None
    try:
        check_files(checkpoint, read_manifest(checkpoint))
    except PickledCheckpoint:
        if not trust_pickle:
            raise
        storage = FileSystemReader(checkpoint)
    reader = Reader(checkpoint, storage)
    state = reader.empty(_POLICY)
    reader.load(state)
    if not state:
        raise CheckpointError(f"{checkpoint} holds no policy")
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()  # empty; the export renames its own directory into place
    export_model(config, {key.removeprefix(_POLICY): tensor for key, tensor in state.items()}, out)
