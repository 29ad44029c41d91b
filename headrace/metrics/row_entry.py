"""What the table of a run's rows knows of each key."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.metrics.views import Chart, Graph

SAME = ""
"""As a meaning: that of the key before, in the same rows. The page has one line for both."""
GAUGE_SUFFIX = "; of the last local update"


@dataclass(frozen=True)
class Entry:
    """One key of `metrics.jsonl`."""

    name: str
    meaning: str
    when: str = ""
    """When it is in a row: "" always, else the case."""
    gauge: str = ""
    """Help text of the trainer's gauge that shows the newest value; "" for none."""
    absent: float | None = None
    """What the gauge shows after a row without the key; None: the key is in every row."""
    chart: Chart | None = None
    graph: Graph | None = None
    """The gauge's panel; others that show it name it themselves."""
    unread: str = ""
    """Why neither a panel nor a rule reads the gauge."""

    @property
    def gauge_name(self) -> str:
        return "headrace_" + self.name.replace("/", "_")


class RowTable:
    """The keys of one file of rows."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        """By key, in the order of docs/metrics.md."""

    def key(
        self,
        name: str,
        meaning: str,
        *,
        when: str = "",
        gauge: str = "",
        absent: float | None = None,
        chart: Chart | None = None,
        graph: Graph | None = None,
        unread: str = "",
    ) -> str:
        """Enters a key and returns it. The parameters are those of `Entry`.

        Raises ValueError for a key that is there already, and for a panel without a gauge to show.
        """
        if name in self.entries:
            raise ValueError(f"{name} is entered twice")
        if graph is not None and not gauge:
            raise ValueError(f"{name}: a panel shows a gauge, and there is none")
        if meaning == SAME:
            before = next(reversed(self.entries.values()))
            meaning, when = before.meaning, before.when
        self.entries[name] = Entry(name, meaning, when, gauge, absent, chart, graph, unread)
        return name
