"""Generate the chart's Grafana dashboard: `python -m headrace.monitoring.dashboard`.

The modules `rows_...` define the panels; this one adds what all panels share. Conventions: variables
`datasource`, `namespace`, `release` (one run) and `pod` (any number), a fixed uid, `$__rate_interval` in
rates, ratios 0-1 in `percentunit`, and `${datasource}` in every panel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.metrics import coordinator, queue, rollouter, trainer
from headrace.monitoring.expressions import panel_of
from headrace.monitoring.panels import Panel, PanelRow
from headrace.monitoring.rows_balance import BALANCE, OVERVIEW
from headrace.monitoring.rows_compute import GPU, TRAINER, VLLM
from headrace.monitoring.rows_flow import QUEUE, STALENESS, SYNC

TARGET = Path(__file__).resolve().parents[2] / "helm" / "headrace" / "dashboards" / "headrace.json"
UID = "headrace-run"
SCHEMA = 39
_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RED, _YELLOW, _GREEN = "red", "yellow", "green"


def build(rows: Sequence[PanelRow]) -> dict[str, Any]:
    """Return the dashboard in Grafana's format: rows from top to bottom, panels from left to right."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "datasource": _SOURCE,
                "gridPos": {"h": 1, "w": _WIDTH, "x": 0, "y": y},
                "panels": [],
            }
        )
        y, x, tallest = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > _WIDTH:
                y, x, tallest = y + tallest, 0, 0
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel, len(panels) + 1, place))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "uid": UID,
        "title": "Headrace",
        "description": "One run: balance, staleness, queue, sync, engines, trainer.",
        "tags": ["headrace"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    run = 'namespace=~"$namespace", release=~"$release"'
    asked = {
        "namespace": "label_values(headrace_queue_redis_up, namespace)",
        "release": 'label_values(headrace_queue_redis_up{namespace=~"$namespace"}, release)',
        "pod": f"label_values(up{{{run}}}, pod)",
    }
    all_of_them = {"allValue": ".*", "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return [
        source | {"hide": 0, "multi": False, "includeAll": False, "refresh": 1},
        *(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": _SOURCE,
                "definition": query,
                "query": {"query": query, "refId": f"variable-{name}"},
                "hide": 0,
                "multi": name == "pod",
                "includeAll": name == "pod",
                "refresh": 2,
                "sort": 1,
                **(all_of_them if name == "pod" else {}),
            }
            for name, query in asked.items()
        ),
    ]


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
    }
    if panel.kind == "text":
        return out | {"options": {"mode": "markdown", "content": panel.text}}
    out["targets"] = [
        {
            "refId": chr(ord("A") + place),
            "datasource": _SOURCE,
            "editorMode": "code",
            "expr": expression,
            "legendFormat": legend,
            "range": panel.kind != "stat",
            "instant": panel.kind == "stat",
        }
        for place, (legend, expression) in enumerate(panel.queries)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit} | _thresholds(panel) | _mappings(panel)
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    out["fieldConfig"] = {"defaults": defaults, "overrides": []}
    if panel.kind == "stat":
        calc = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return out | {
            "options": {"reduceOptions": calc, "colorMode": "value", "graphMode": "none", "textMode": "auto"}
        }
    defaults["custom"] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "off" if panel.high is None else "line"},
    }
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return out | {"options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}}


def _thresholds(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": _GREEN, "value": None}]
    for colour, value in ((_YELLOW, panel.low), (_RED, panel.high)):
        if value is not None:
            steps.append({"color": colour, "value": value})
    return {"thresholds": {"mode": "absolute", "steps": steps}}


def _mappings(panel: Panel) -> dict[str, Any]:
    options = {
        str(value): {"text": text, "color": colour, "index": value}
        for value, (text, colour) in enumerate(panel.names)
    }
    return {"mappings": [{"type": "value", "options": options}]} if options else {}


def with_others(row: PanelRow) -> PanelRow:
    """Return the row with panels appended for the entries that it does not name."""
    shown = {panel.title for panel in row.panels}
    others = [
        panel_of(entry)
        for module in (trainer, rollouter, coordinator, queue)
        for entry in module.SERVICE.entries.values()
        if entry.graph is not None and entry.graph.row == row.title and entry.graph.title not in shown
    ]
    return PanelRow(row.title, [*row.panels, *others])


def render() -> str:
    rows = (OVERVIEW, BALANCE, STALENESS, QUEUE, SYNC, VLLM, TRAINER, GPU)
    return json.dumps(build([with_others(row) for row in rows]), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
