"""Configuration of what a run records for people to read."""

from __future__ import annotations

from pydantic import Field

from headrace.config.base import Section


class DumpConfig(Section):
    """A bounded record of trained samples under `samples/` in the run's directory, for `headrace samples`
    and `headrace report`."""

    enable: bool = True
    """Record samples."""
    samples_per_update: int = Field(16, gt=0)
    """Samples recorded per local update, drawn at random over all ranks; fewer where responses are so long
    that they would take more than 1/512 of `max_bytes`."""
    max_bytes: int = Field(256 * 1024 * 1024, ge=64 * 1024)
    """Size of the record. Beyond it the oldest are deleted, except the very beginning of the run."""
    log_probs: bool = False
    """Record the behaviour log-prob of every token too; about twice the size."""
