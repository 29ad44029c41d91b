"""A checkpoint as a Hugging Face model, without a process group and without the optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from headrace.config import RunConfig
from headrace_trainer.policy import export_model

_POLICY = "model."


def export_checkpoint(config: RunConfig, checkpoint: Path, out: Path) -> None:
    """Write the policy of `checkpoint` to `out`. Raises ValueError when the checkpoint cannot be read."""
    try:
        known = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        state = {
            key: torch.empty(found.size, dtype=found.properties.dtype)
            for key, found in known.items()
            if key.startswith(_POLICY) and isinstance(found, TensorStorageMetadata)
        }
        if not state:
            raise ValueError("it holds no policy")
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    except (Exception, CheckpointException) as error:  # whatever the reader makes of a damaged file
        raise ValueError(f"{checkpoint} cannot be read: {error!r}") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()  # an empty one; the export renames its own into place
    export_model(config, {key.removeprefix(_POLICY): tensor for key, tensor in state.items()}, out)
