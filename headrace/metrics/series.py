"""How a service declares its Prometheus metrics: the objects that its code sets, and what each is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase

from headrace.metrics.late_gauge import LateGauge
from headrace.metrics.views import Graph

disable_created_metrics()  # half of all series, which nobody reads

Kind = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, Sequence[str]]
"""Each label with the values that are shown from the start at 0: the first of a kind would not show as an
increase. () where they are not known."""
Known = TypeVar("Known", bound=MetricWrapperBase)


@dataclass(frozen=True)
class Entry:
    """One Prometheus metric."""

    name: str
    """As it is scraped: that of a counter ends with `_total`."""
    type: Kind
    documentation: str
    labels: tuple[str, ...] = ()
    graph: Graph | None = None
    """Its panel; views that join several metrics name them themselves."""
    unread: str = ""
    """Why neither a panel nor a rule reads it."""


@dataclass(frozen=True)
class Family:
    """A metric whose values a collector reads at each scrape."""

    entry: Entry
    known: tuple[str, ...] = ()
    """Values of its only label that are shown at 0 when nothing has them."""

    def value(self, value: float | None = None) -> CounterMetricFamily | GaugeMetricFamily:
        """The one series; None: not there."""
        made = _FAMILIES[self.entry.type]
        return made(self._base, self.entry.documentation, value=None if value is None else float(value))

    def by(self, values: Iterable[tuple[Sequence[str], float]]) -> CounterMetricFamily | GaugeMetricFamily:
        """A series for each (values of the labels, value)."""
        family = _FAMILIES[self.entry.type](
            self._base, self.entry.documentation, labels=list(self.entry.labels)
        )
        for labels, value in values:
            family.add_metric(list(labels), value)
        return family

    def counts(self, counts: Mapping[str, float]) -> CounterMetricFamily | GaugeMetricFamily:
        """By the only label, sorted; with the known values."""
        whole = {**dict.fromkeys(self.known, 0.0), **counts}
        return self.by(((value,), count) for value, count in sorted(whole.items()))

    @property
    def _base(self) -> str:
        return self.entry.name.removesuffix("_total") if self.entry.type == "counter" else self.entry.name


_FAMILIES: dict[str, type[CounterMetricFamily] | type[GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}
Shown = MetricWrapperBase | Family
"""What a service declares."""


class Service:
    """The metrics of one service. Declared is not shown: `show` puts them into a registry."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[str, Entry] = {}
        """By the name that is scraped."""
        self._objects: list[MetricWrapperBase] = []

    def counter(
        self,
        name: str,
        documentation: str,
        labels: Labels | None = None,
        *,
        graph: Graph | None = None,
        unread: str = "",
    ) -> Counter:
        """`name`: with `_total` at its end. Raises ValueError for one that is there, or without it."""
        entry = self._enter(name, "counter", documentation, labels, graph, unread)
        return self._made(Counter(name, documentation, entry.labels, registry=None), entry, labels)

    def gauge(
        self,
        name: str,
        documentation: str,
        *,
        graph: Graph | None = None,
        unread: str = "",
    ) -> Gauge:
        entry = self._enter(name, "gauge", documentation, None, graph, unread)
        return self._made(Gauge(name, documentation, registry=None), entry, None)

    def late_gauge(
        self, name: str, documentation: str, *, graph: Graph | None = None, unread: str = ""
    ) -> LateGauge:
        """One that is shown from its first value on."""
        entry = self._enter(name, "gauge", documentation, None, graph, unread)
        found = LateGauge(name, documentation)
        _ENTRIES[id(found)] = entry
        return found

    def histogram(
        self,
        name: str,
        documentation: str,
        labels: Labels | None = None,
        *,
        buckets: Sequence[float],
        graph: Graph | None = None,
        unread: str = "",
    ) -> Histogram:
        entry = self._enter(name, "histogram", documentation, labels, graph, unread)
        made = Histogram(name, documentation, entry.labels, buckets=buckets, registry=None)
        return self._made(made, entry, labels)

    def family(
        self,
        kind: Literal["counter", "gauge"],
        name: str,
        documentation: str,
        labels: Labels | None = None,
        *,
        graph: Graph | None = None,
        unread: str = "",
    ) -> Family:
        """What a collector of the service reads when it is scraped."""
        entry = self._enter(name, kind, documentation, labels, graph, unread)
        return Family(entry, tuple(itertools.chain(*(labels or {}).values())))

    def show(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Once, when the service starts: everything but the late gauges and what collectors read."""
        for found in self._objects:
            registry.register(found)

    def _enter(
        self,
        name: str,
        kind: Kind,
        documentation: str,
        labels: Labels | None,
        graph: Graph | None,
        unread: str,
    ) -> Entry:
        if name in self.entries:
            raise ValueError(f"{name} is entered twice")
        if name.endswith("_total") != (kind == "counter"):
            raise ValueError(f"{name}: names of counters, and of nothing else, end with _total")
        entry = Entry(name, kind, documentation, tuple(labels or ()), graph, unread)
        self.entries[name] = entry
        return entry

    def _made(self, found: Known, entry: Entry, labels: Labels | None) -> Known:
        self._objects.append(found)
        _ENTRIES[id(found)] = entry
        if labels:
            for values in itertools.product(*labels.values()):
                found.labels(*values)
        return found


_ENTRIES: dict[int, Entry] = {}
"""By the identity of the object, which lives as long as its module."""


def entry_of(shown: Shown) -> Entry:
    """Of what a service has declared."""
    return shown.entry if isinstance(shown, Family) else _ENTRIES[id(shown)]
