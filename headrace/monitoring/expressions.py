"""Short helpers for PromQL and panels, used by the dashboard's rows.

`of_run` selects a metric of the chosen runs, `of_pods` one of their chosen pods. Metrics of the trainer, the
queue service and the coordinator belong to the run and ignore the choice of pods.
"""

from __future__ import annotations

from headrace.metrics.series import Entry, Shown, entry_of
from headrace.monitoring.panels import Panel

_RUN = 'namespace=~"$namespace", release=~"$release"'
_PODS = f'{_RUN}, pod=~"$pod"'


Metric = str | Shown
"""Our own metric, or the name of a recording rule or of another exporter's metric."""


def name_of(metric: Metric) -> str:
    return metric if isinstance(metric, str) else entry_of(metric).name


def sum_of(histogram: Metric) -> str:
    return f"{name_of(histogram)}_sum"


def count_of(histogram: Metric) -> str:
    return f"{name_of(histogram)}_count"


def of_run(metric: Metric, more: str = "") -> str:
    return f"{name_of(metric)}{{{', '.join(filter(None, (_RUN, more)))}}}"


def of_pods(metric: Metric, more: str = "") -> str:
    return f"{name_of(metric)}{{{', '.join(filter(None, (_PODS, more)))}}}"


def rate(selected: str, by: str = "release") -> str:
    return f"sum by ({by}) (rate({selected}[$__rate_interval]))"


def largest(selected: str, by: str = "release") -> str:
    return f"max by ({by}) ({selected})"


def quantile(q: float, metric: Metric, more: str = "", by: str = "release") -> str:
    buckets = f"sum by ({by}, le) (rate({of_run(name_of(metric) + '_bucket', more)}[$__rate_interval]))"
    return f"histogram_quantile({q}, {buckets})"


def mean(metric: Metric, by: str = "release") -> str:
    """Return the mean of a histogram."""
    return f"{rate(of_run(sum_of(metric)), by)} / {rate(of_run(count_of(metric)), by)}"


def share(part: Metric, whole: Metric) -> str:
    return f"{rate(of_run(part))} / {rate(of_run(whole))}"


def lines(title: str, unit: str, *queries: tuple[str, str], about: str = "", stacked: bool = False) -> Panel:
    return Panel("timeseries", title, unit, queries, description=about, stacked=stacked)


def number(
    title: str,
    unit: str,
    expression: str,
    about: str = "",
    low: float | None = None,
    high: float | None = None,
) -> Panel:
    return Panel(
        "stat", title, unit, [("{{release}}", expression)], about, width=4, height=4, low=low, high=high
    )


def of(metric: Shown) -> Panel:
    """Return the panel that a metric's entry defines. Raises ValueError if it defines none."""
    return panel_of(entry_of(metric))


def panel_of(entry: Entry) -> Panel:
    """Like `of`, for an entry."""
    graph = entry.graph
    if graph is None:
        raise ValueError(f"{entry.name} has no panel of its own")
    if entry.type == "histogram" and not graph.expression:
        queries = [(f"p{round(100 * q)}", quantile(q, entry.name)) for q in (0.5, 0.99)]
    else:
        by = entry.labels or ("release",)
        legend = graph.legend or " ".join(f"{{{{{label}}}}}" for label in by)
        over = rate if entry.type == "counter" else largest
        queries = [(legend, graph.expression or over(of_run(entry.name), ", ".join(by)))]
    return lines(graph.title, graph.unit, *queries, about=graph.about)
