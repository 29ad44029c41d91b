"""Configuration of the data: where prompts come from, and how long they may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from headrace.config.base import RUN, RUN_NOT_IN_LEDGER, Section

_LARGEST_RATIO = 10_000
"""Largest ratio of two weights: a block of a mixture must hold a prompt of every entry."""


class WeightedFile(Section):
    """An entry of a mixture."""

    path: str
    """The same as an entry without a weight."""
    weight: float = Field(ge=0)
    """Share of the prompts that come from it, relative to the other weights; 0 leaves it out."""


class DataConfig(Section):
    """Prompts in verl's row format; see docs/data.md."""

    train_files: Annotated[list[str | WeightedFile], RUN_NOT_IN_LEDGER] = Field(min_length=1)
    """Training data, read in this order: files (Parquet, JSON lines, JSON; gzip too), directories, globs,
    `reasoning_gym:<dataset>?size=1000&seed=3` or a demo's, e.g. `demo:spell_backward/train`. Entries with
    weights, `{path: ..., weight: ...}`, are mixed."""
    val_files: Annotated[list[str], RUN_NOT_IN_LEDGER] = []
    """Held-out data for validation, of the same kinds."""
    skip_invalid: Annotated[bool, RUN_NOT_IN_LEDGER] = False
    """Skip unusable rows and report how many; false: they are an error before the run starts."""
    ground_truth_as_json: Annotated[bool, RUN_NOT_IN_LEDGER] = False
    """Pass a `ground_truth` that is not a string to the reward function as JSON text; false: it is an
    error."""
    max_prompt_length: Annotated[int, RUN] = Field(512, gt=0)
    """Longest prompt in tokens."""
    truncation: Annotated[Literal["error", "skip", "truncate_left"], RUN_NOT_IN_LEDGER] = "error"
    """What happens to longer prompts: an error before the run starts, skipped, or truncated at the beginning
    so that the last tokens remain. The last two are counted."""
    filter_overlong_prompts: Annotated[bool, RUN_NOT_IN_LEDGER] = False
    """Skip longer prompts whatever `truncation` says, as verl does; the same as `truncation: skip`."""
    max_response_length: Annotated[int, RUN] = Field(512, gt=0)
    """Longest response in tokens, over all its segments."""
    chat_template: Annotated[str | None, RUN_NOT_IN_LEDGER] = None
    """A file with the chat template (Jinja); unset: the tokenizer's own."""
    apply_chat_template_kwargs: Annotated[dict[str, Any], RUN_NOT_IN_LEDGER] = {}
    """Additional variables of the chat template, e.g. `{enable_thinking: false}`."""
    shuffle: Annotated[bool, RUN] = True
    """Reshuffle the rows every epoch, as a pure function of (seed, epoch)."""
    drop_last: bool = False
    """Drop the last update if it has fewer samples than the others; false: train it as it is."""
    max_ahead: int | None = Field(None, gt=0)
    """Most prompts kept ready ahead of the rollouters; unset: twice the gate."""

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        """Accept a single entry without a list, as verl does, and report invalid entries in plain words."""
        entries = [value] if isinstance(value, str | dict) else value
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and not {"path"} <= entry.keys() <= {"path", "weight"}:
                raise ValueError("write an entry as a text or as {path: ..., weight: ...}")
            if isinstance(entry, dict) and not isinstance(entry["path"], str):
                raise ValueError(f"path: write a text, found {entry['path']!r}")
        return entries

    @field_validator("train_files")
    @classmethod
    def _weights_of_all(cls, entries: list[str | WeightedFile]) -> list[str | WeightedFile]:
        weights = [entry.weight for entry in entries if isinstance(entry, WeightedFile)]
        if not weights:
            return entries
        if len(weights) < len(entries):
            bare = next(entry for entry in entries if isinstance(entry, str))
            raise ValueError(f"give {bare} a weight too ({{path: ..., weight: ...}}), or none to any")
        used = [weight for weight in weights if weight]
        if not used:
            raise ValueError("every weight is 0; give one entry a weight above it")
        if max(used) > _LARGEST_RATIO * min(used):
            raise ValueError(f"weights may differ by a factor of {_LARGEST_RATIO:,}; set small ones to 0")
        return entries

    @property
    def overlong(self) -> Literal["error", "skip", "truncate_left"]:
        """Return what happens to prompts that are too long."""
        return "skip" if self.filter_overlong_prompts else self.truncation

    @property
    def train_weights(self) -> list[float] | None:
        """Return the weights of `train_paths`; None if no entry has one."""
        weights = [entry.weight for entry in self.train_files if isinstance(entry, WeightedFile)]
        return [weight for weight in weights if weight] or None

    @property
    def train_paths(self) -> list[str]:
        """Return the training data to read, without entries of weight 0."""
        return [
            entry if isinstance(entry, str) else entry.path
            for entry in self.train_files
            if isinstance(entry, str) or entry.weight
        ]
