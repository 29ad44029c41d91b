"""PromQL and panels in few words, for the rows of the dashboard.

`of_run` selects a metric of the chosen runs, `of_pods` one of the chosen pods of them. Numbers of the
trainer, the queue service and the coordinator belong to the run, whatever pod is chosen.
"""

from __future__ import annotations

from headrace.monitoring.dashboard import Panel

_RUN = 'namespace=~"$namespace", release=~"$release"'
_PODS = f'{_RUN}, pod=~"$pod"'


def of_run(metric: str, more: str = "") -> str:
    return f"{metric}{{{', '.join(filter(None, (_RUN, more)))}}}"


def of_pods(metric: str, more: str = "") -> str:
    return f"{metric}{{{', '.join(filter(None, (_PODS, more)))}}}"


def rate(selected: str, by: str = "release") -> str:
    return f"sum by ({by}) (rate({selected}[$__rate_interval]))"


def largest(selected: str, by: str = "release") -> str:
    return f"max by ({by}) ({selected})"


def quantile(q: float, metric: str, more: str = "", by: str = "release") -> str:
    buckets = f"sum by ({by}, le) (rate({of_run(metric + '_bucket', more)}[$__rate_interval]))"
    return f"histogram_quantile({q}, {buckets})"


def mean(metric: str, by: str = "release") -> str:
    """Of a histogram."""
    return f"{rate(of_run(metric + '_sum'), by)} / {rate(of_run(metric + '_count'), by)}"


def share(part: str, whole: str) -> str:
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
