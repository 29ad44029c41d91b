"""The base class of configuration sections, and the lifetimes of field values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Lifetime:
    """How long the value of a field stays in force, as in `Annotated[int, RUN]`.

    A field without a lifetime has its section's, and the default is `START`. `headrace.config.lifetime` lists
    the keys of each.
    """

    name: Literal["run", "start", "live", "initial"]
    in_ledger: bool = False
    """Whether the ledger and every checkpoint record the value (`headrace.config.identity`)."""


RUN = Lifetime("run", in_ledger=True)
"""Fixed for the life of the run, because its samples and checkpoints depend on the value."""
RUN_NOT_IN_LEDGER = Lifetime("run")
"""As `RUN`, but not recorded. Of the data, the ledger records digests instead. The run's name and the URL of
Redis are what the ledger is found by."""
START = Lifetime("start")
"""Read when a service starts. It may change between starts."""
LIVE = Lifetime("live")
"""May change during the run, by `headrace tune` or by a chart upgrade, which restarts no pod."""
INITIAL = Lifetime("initial")
"""Used when the run starts for the first time. Afterwards `headrace scale` and `kubectl scale` change the
number. A change of the value during the run is neither refused nor applied."""


class Section(BaseModel):
    """Base of every section. Unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
