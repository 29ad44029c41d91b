"""The parts of a dashboard: rows of panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: (legend, expression) pairs; `unit` in Grafana's words."""

    kind: str
    """`timeseries`, `stat` or `text`."""
    title: str
    unit: str = "short"
    queries: Sequence[tuple[str, str]] = ()
    description: str = ""
    text: str = ""
    """Markdown of a text panel."""
    width: int = 8
    height: int = 8
    stacked: bool = False
    low: float | None = None
    """Values of at least this are yellow."""
    high: float | None = None
    """Values of at least this are red."""
    names: Sequence[tuple[str, str]] = ()
    """(text, colour) of the values 0, 1, 2, ..."""


@dataclass(frozen=True)
class PanelRow:
    title: str
    panels: Sequence[Panel]
