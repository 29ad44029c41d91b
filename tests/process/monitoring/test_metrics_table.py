"""A metric is one entry: everything that shows it follows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace.metrics import coordinator, queue, rollouter, row_keys, trainer
from headrace.metrics.row_entry import SAME, RowTable
from headrace.metrics.series import Service, entry_of
from headrace.metrics.views import Graph
from headrace.monitoring.expressions import of, of_run

ROOT = Path(__file__).resolve().parents[3]
ADDED = """
import json
from headrace.metrics import row_keys
from headrace.metrics.views import Chart, Graph

row_keys.key("test/heat", "how warm it is", gauge="Heat of the room",
         chart=Chart("Policy", "Heat", "heat", unit="K"), graph=Graph("Trainer", "Heat", "short"))

from headrace.metrics import queue, rollouter
SEEN = rollouter.SERVICE.counter("headrace_test_seen_total", "What was seen", {"kind": ("far", "near")},
                                 graph=Graph("Balance", "Seen"))
queue.gauge("test_total_wanted", "Samples of the whole run", lambda stats: stats.total)

from prometheus_client import REGISTRY, generate_latest
from headrace.reference import metrics as metrics_doc
from headrace.ledger.in_memory import InMemoryLedger
from headrace.monitoring import dashboard
from headrace.report import catalogue
from headrace_trainer.records import metrics
from headrace_rollouter import metrics as _
from tests.process.service.test_service_metrics import ROW

SEEN.labels(kind="far").inc()
nothing = metrics.Observed((), (), (), (), (), 0)
metrics.observe({**ROW, "test/heat": 293.0}, {}, 4, 8, nothing, 0.0)
panels = {p["title"]: [t["expr"] for t in p.get("targets", ())]
          for p in json.loads(dashboard.render())["panels"]}
print(json.dumps({
    "problems": row_keys.problems({*row_keys.TABLE.entries, "test/heat"}, set()),
    "missing": row_keys.problems({key for key in row_keys.TABLE.entries if key != "test/heat"}, set()),
    "page": metrics_doc.render().splitlines(),
    "scraped": generate_latest().decode().splitlines(),
    "of_ledger": [m.name for m in queue.of_ledger(InMemoryLedger().stats())],
    "panels": panels,
    "charts": [(c.title, c.keys) for c in catalogue.section("Policy")],
}))
"""


@pytest.fixture(scope="module")
def added() -> dict[str, Any]:
    """What a process shows to whose tables three entries were added."""
    done = subprocess.run(
        [sys.executable, "-c", ADDED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_one_entry_makes_a_key_of_the_run_log(added: dict[str, Any]) -> None:
    assert added["problems"] == []
    assert added["missing"] == ["test/heat: documented, but in no row"]


def test_and_what_prometheus_scrapes(added: dict[str, Any]) -> None:
    assert "headrace_test_heat 293.0" in added["scraped"]
    assert 'headrace_test_seen_total{kind="far"} 1.0' in added["scraped"]
    assert 'headrace_test_seen_total{kind="near"} 0.0' in added["scraped"], (
        "known values are there from the start"
    )
    assert "headrace_queue_test_total_wanted" in added["of_ledger"]


def test_and_the_lines_of_the_page(added: dict[str, Any]) -> None:
    assert {
        "| `test/heat` | how warm it is | always |",
        "| `headrace_test_heat` | gauge | Heat of the room; of the last local update | trainer |",
        "| `headrace_test_seen_total` | counter | What was seen | rollouter |",
        "| `headrace_queue_test_total_wanted` | gauge | Samples of the whole run | queue |",
    } <= set(added["page"])


def test_and_the_panel_of_the_dashboard(added: dict[str, Any]) -> None:
    run = 'namespace=~"$namespace", release=~"$release"'
    assert added["panels"]["Heat"] == [f"max by (release) (headrace_test_heat{{{run}}})"]
    assert added["panels"]["Seen"] == [
        f"sum by (kind) (rate(headrace_test_seen_total{{{run}}}[$__rate_interval]))"
    ]


def test_and_the_chart_of_the_report(added: dict[str, Any]) -> None:
    assert added["charts"][-1] == ["Heat", [["test/heat", "heat"]]]


def test_a_key_is_the_constant_of_its_name() -> None:
    for key in row_keys.TABLE.entries:
        assert getattr(row_keys, key.upper().replace("/", "_")) == key


def test_a_key_in_quotes_is_one_of_the_table() -> None:
    """Where a key is not named by its constant: what looks like one has to be one."""
    roots = {key.partition("/")[0] for key in row_keys.TABLE.entries if "/" in key}
    wrong = []
    folders = [
        ROOT / "services" / "trainer",
        *(ROOT / "headrace" / name for name in ("cli", "report", "runner")),
    ]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for literal in re.findall(r'(?<!\w)"([a-z_]+/[a-z0-9_/]+)"', path.read_text()):
            if literal.partition("/")[0] in roots and literal not in row_keys.TABLE.entries:
                wrong.append(f"{path.name}: {literal}")
    assert wrong == []


def test_no_two_services_show_one_name() -> None:
    names = [n for m in (trainer, rollouter, coordinator, queue) for n in m.SERVICE.entries]
    assert len(names) == len(set(names))


def test_what_is_unread_has_no_panel() -> None:
    for module in (trainer, rollouter, coordinator, queue):
        for entry in module.SERVICE.entries.values():
            assert not (entry.unread and entry.graph), entry.name


def test_a_row_table_refuses_what_cannot_be_meant() -> None:
    table = RowTable()
    table.key("a/one", "the first", when="sometimes")
    table.key("a/two", SAME)
    assert (table.entries["a/two"].meaning, table.entries["a/two"].when) == ("the first", "sometimes")
    with pytest.raises(ValueError, match="a/one is entered twice"):
        table.key("a/one", "again")
    with pytest.raises(ValueError, match="a panel shows a gauge"):
        table.key("a/three", "the third", graph=Graph("Queue", "Three"))


def test_so_does_that_of_a_service() -> None:
    service = Service("test")
    service.gauge("one", "the first")
    with pytest.raises(ValueError, match="one is entered twice"):
        service.gauge("one", "again")
    with pytest.raises(ValueError, match="end with _total"):
        service.counter("two", "a counter")
    with pytest.raises(ValueError, match="end with _total"):
        service.gauge("three_total", "no counter")


def test_declared_is_not_shown() -> None:
    service, registry = Service("test"), CollectorRegistry()
    gauge, late = service.gauge("one", "the first"), service.late_gauge("two", "the second")
    assert generate_latest(registry) == b""
    service.show(registry)
    gauge.set(3)
    assert "one 3.0" in generate_latest(registry).decode()
    assert "two" not in generate_latest(registry).decode()
    assert (entry_of(gauge).name, entry_of(late).name) == ("one", "two")


def test_a_panel_is_named_by_the_entry() -> None:
    assert of_run(trainer.SAMPLES).startswith("headrace_samples_trained_total{")
    assert [legend for legend, _ in of(trainer.UPDATE_GAP).queries] == ["p50", "p99"]
    with pytest.raises(ValueError, match="headrace_local_updates_total has no panel of its own"):
        of(trainer.UPDATES)
