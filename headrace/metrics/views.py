"""Where a metric is shown, as its entry says it.

Views that join several metrics are in `headrace.report.catalogue` and `headrace.monitoring.rows_...`, which
also have the order of all. A view that they do not name comes last in its section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Section = Literal["Learning", "Where the time goes", "Staleness", "Lengths", "Queue", "Sync", "Policy"]
"""Of the page that `headrace report` makes."""
DashboardRow = Literal["Overview", "Balance", "Staleness", "Queue", "Sync", "vLLM", "Trainer", "GPU"]


@dataclass(frozen=True)
class Chart:
    """A chart of the report with one curve."""

    section: Section
    title: str
    legend: str
    unit: str = ""
    percent: bool = False
    log: bool = False
    smooth: bool = False
    """Noisy: a moving mean is drawn over the faint values."""
    about: str = ""


@dataclass(frozen=True)
class Graph:
    """A panel of the dashboard."""

    row: DashboardRow
    title: str
    unit: str = "short"
    """In Grafana's words."""
    legend: str = ""
    """Unset: the release, the metric's label, or the quantile of a histogram."""
    about: str = ""
    expression: str = ""
    """PromQL; unset: the gauge, the counter's rate by its label, or two quantiles of the histogram."""
