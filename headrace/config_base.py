"""What every section of the configuration has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: unknown keys are errors, and so are infinite numbers."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
