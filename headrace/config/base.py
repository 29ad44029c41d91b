"""What every section of the configuration has in common, and how long the value of a field holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Lifetime:
    """How long the value of a field holds: `Annotated[int, RUN]`.

    A field without one has that of its section, and the whole configuration has `START`.
    `headrace.config.lifetime` finds the keys of each.
    """

    name: Literal["run", "start", "live", "initial"]
    in_ledger: bool = False
    """Whether the ledger and every checkpoint remember the value itself (`headrace.config.identity`)."""


RUN = Lifetime("run", in_ledger=True)
"""Fixed for the life of the run: its samples and checkpoints are made with the value."""
RUN_NOT_IN_LEDGER = Lifetime("run")
"""The same. The ledger remembers digests of the data instead of how they were read, and it is what the run's
name and the URL of Redis lead to."""
START = Lifetime("start")
"""Read when a service starts; another start may have another value."""
LIVE = Lifetime("live")
"""May change while the run is on: by `headrace tune`, or by an upgrade of the chart, which rolls no pod."""
INITIAL = Lifetime("initial")
"""Counts when the run starts for the first time; `headrace scale` and `kubectl scale` change what it stands
for. A change while the run is on is neither refused nor followed."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, and so are infinite numbers."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
