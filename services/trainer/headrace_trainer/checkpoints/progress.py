"""The training loop's own state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from headrace.records.checkpoints import CheckpointError, Manifest

_AT_THE_TOP = ("run_id", "lineage", "step", "version", "trained")
"""Of a manifest: what others than the trainer read."""


@dataclass
class TrainingProgress:
    """State of the training loop outside the models and optimizers."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    run_id: str = ""
    """Chosen at the first start of the run; a resume keeps it."""

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
        """The newest committed version that precedes these weights, and the windows of training in between.
        `version`: the last committed one, perhaps another trainer's. A snapshot that had not committed when
        this was saved may have lost its number to another."""
        known = sorted(map(int, self.step_of_version))
        parent = max((v for v in known if v <= min(version, self.version)), default=min(version, 0))
        steps = self.step_of_version.get(str(known[-1]), 0) if known else 0
        return parent, sum(v > parent for v in known) + (self.optimizer_steps > steps)

    def count_lost(self, version: int, window_steps: int) -> None:
        """Give a step to the versions up to `version`, the last committed, that a lost trainer made later.

        A policy that was l optimizer steps ahead is as far from the present one as a policy l steps behind,
        so it is counted as the latter. `window_steps`: optimizer steps per window.
        """
        if version < 0:
            return
        parent, _ = self.origin(version)
        begun = self.step_of_version.setdefault(str(parent), 0)  # missing: the initial weights
        for lost in range(parent + 1, version + 1):
            ahead = begun + (lost - parent) * window_steps - self.optimizer_steps
            self.step_of_version[str(lost)] = self.optimizer_steps - max(0, ahead)

    def for_manifest(self) -> dict[str, Any]:
        """This state as fields of a `Manifest`."""
        rest = asdict(self)
        return {**{key: rest.pop(key) for key in _AT_THE_TOP}, "progress": rest}


def progress_of(manifest: Manifest) -> TrainingProgress:
    """The state in `manifest`. Raises CheckpointError if a field is missing or has the wrong type."""
    plain = {**manifest.progress, **{key: getattr(manifest, key) for key in _AT_THE_TOP}}
    try:
        return TypeAdapter(TrainingProgress).validate_json(json.dumps(plain))
    except ValidationError as error:
        raise CheckpointError(
            f"the manifest of step {manifest.step} is another release's: {error}"
        ) from error
