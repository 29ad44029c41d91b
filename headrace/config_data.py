"""Configuration of the data: where prompts come from, and how long they may be."""

from __future__ import annotations

from pydantic import Field

from headrace.config_base import Section


class DataConfig(Section):
    """Prompts: JSON lines in verl's row format."""

    train_files: list[str] = Field(min_length=1)
    """Training files, read in this order, or a demo's, e.g. `demo:spell_backward/train`."""
    val_files: list[str] = []
    """Held-out files for validation, or a demo's, e.g. `demo:spell_backward/val`."""
    max_prompt_length: int = Field(512, gt=0)
    """Longest prompt in tokens; a longer one is an error before the run starts."""
    max_response_length: int = Field(512, gt=0)
    """Longest response in tokens, over all its segments."""
    shuffle: bool = True
    """Shuffle the rows anew in every epoch, as a pure function of (seed, epoch)."""
    drop_last: bool = False
    """Leave out the last update when it has fewer samples than the others; else it is trained as it is."""
    max_ahead: int | None = Field(None, gt=0)
    """Prompts that may lie ready ahead of the rollouters; twice the gate when unset."""
