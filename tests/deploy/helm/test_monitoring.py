"""Rules and dashboards get into the chart as they are: their own `{{ }}` are Prometheus's and Grafana's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from scripts.kube_tools import run_helm
from tests.deploy.helm import charts
from tests.deploy.helm.objects import Object, name_of, of_kind, read

RULES = {
    "groups": [
        {
            "name": "headrace",
            "rules": [
                {
                    "alert": "SomethingIsWrong",
                    "expr": "up == 0",
                    "annotations": {"summary": 'pod {{ $labels.pod }}: {{ $value | printf "%.2f" }} of "it"'},
                }
            ],
        }
    ]
}
DASHBOARD = {
    "uid": "headrace",
    "panels": [{"title": "{{release}}", "legend": "{{pod}}", "unit": "percentunit"}],
}


def render(folder: Path) -> list[Object]:
    """The preset with all of monitoring, of a chart whose rules and dashboards are ours."""
    chart = folder / "headrace"
    shutil.copytree(charts.CHART, chart)
    for name in ("rules", "dashboards"):
        shutil.rmtree(chart / name, ignore_errors=True)
    return read(_text(chart))


def _text(chart: Path) -> str:
    return run_helm("template", "demo", str(chart), "--values", str(chart / "ci" / "keda.yaml"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    folder = tmp_path_factory.mktemp("chart")
    render(folder)
    chart = folder / "headrace"
    for name in ("rules/tests", "dashboards"):
        (chart / name).mkdir(parents=True)
    (chart / "rules" / "one.yaml").write_text(yaml.safe_dump(RULES))
    (chart / "rules" / "two.yaml").write_text(yaml.safe_dump({"groups": [{"name": "second", "rules": []}]}))
    (chart / "rules" / "tests" / "one.yaml").write_text("rule_files: [one.yaml]\n")
    (chart / "dashboards" / "one.json").write_text(json.dumps(DASHBOARD, indent=2))
    return read(_text(chart))


def test_rules_are_taken_as_they_are(filled: list[Object]) -> None:
    (rule,) = of_kind(filled, "PrometheusRule")
    assert rule["spec"]["groups"] == [*RULES["groups"], {"name": "second", "rules": []}]
    assert rule["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def alerts(objects: list[Object]) -> dict[str, str]:
    """Links of all alerts of the chart."""
    (rule,) = of_kind(objects, "PrometheusRule")
    every = [r for group in rule["spec"]["groups"] for r in group["rules"]]
    return {r["alert"]: r["annotations"]["runbook_url"] for r in every if "alert" in r}


@pytest.mark.parametrize("base", ["https://git.example/headrace/blob/main/docs", "https://docs.example/"])
def test_alerts_link_to_where_the_pages_are(base: str) -> None:
    """A path within the project leads nowhere from a message of Alertmanager."""
    as_they_are = alerts(charts.rendered("ci/keda.yaml"))
    linked = alerts(
        charts.rendered("ci/keda.yaml", sets=(f"monitoring.rules.runbookBaseUrl={json.dumps(base)}",))
    )
    assert len(linked) > 20
    for name, link in linked.items():
        assert link == f"{base.rstrip('/')}/operations.md#{name.lower()}"
        assert as_they_are[name] == f"docs/operations.md#{name.lower()}"


def test_dashboards_are_taken_as_they_are(filled: list[Object]) -> None:
    (found,) = [o for o in of_kind(filled, "ConfigMap") if o["metadata"]["name"] == "demo-dashboards"]
    assert {name: json.loads(text) for name, text in found["data"].items()} == {"one.json": DASHBOARD}
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_empty_folders_are_no_error(tmp_path: Path) -> None:
    objects = render(tmp_path)
    assert of_kind(objects, "PrometheusRule") == []
    assert [name_of(o) for o in objects if o["metadata"]["name"] == "demo-dashboards"] == []
    assert len(of_kind(objects, "PodMonitor")) == 4


def test_scrapes_carry_the_release() -> None:
    """Dashboards and rules choose by it; a local Prometheus sets the same label."""
    for monitor in of_kind(charts.rendered("ci/keda.yaml"), "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["relabelings"] == [
            {
                "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"],
                "targetLabel": "release",
            }
        ]
        assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_everything_of_it_can_be_left_out() -> None:
    kinds = {o["kind"] for o in charts.rendered()}
    assert not kinds & {"PodMonitor", "PrometheusRule", "ScaledObject", "Role"}
