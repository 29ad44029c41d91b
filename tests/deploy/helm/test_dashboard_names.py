"""The dashboard finds the rollouters' Deployment of the chosen run, and no other, by the chart's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests import monitoring
from tests.deploy.helm import charts
from tests.deploy.helm.objects import of_kind, pods

LONG = "a-release-with-a-name-that-is-longer-than-forty"
RELEASES = ("demo", "demo-2", "my-demo", LONG)


def desired() -> str:
    (panel,) = [p for p in monitoring.dashboard()["panels"] if p["title"] == "Rollouters"]
    (expression,) = [t["expr"] for t in panel["targets"] if t["legendFormat"] == "desired"]
    return str(expression)


@monitoring.needs_promtool
@pytest.mark.parametrize("replicas", [None, 0])
def test_desired_replicas_are_those_of_the_chosen_release(tmp_path: Path, replicas: int | None) -> None:
    """`replicas`: 0 where there is no rollouter to know the Deployment by."""
    series, checks = {}, []
    for number, release in enumerate(RELEASES):
        objects = charts.rendered(release=release)
        (deployment,) = [
            o["metadata"]["name"]
            for o in of_kind(objects, "Deployment")
            if o["metadata"]["name"].endswith("-rollouter")
        ]
        wanted = replicas if replicas is not None else number + 1
        labels = f'namespace="ns", deployment="{deployment}"'
        series[f"kube_deployment_spec_replicas{{{labels}}}"] = f"{wanted}x10"
        series[f'kube_deployment_spec_replicas{{namespace="other", deployment="{deployment}"}}'] = "50x10"
        for pod in pods(objects):
            part = pod.component
            if part in ("coordinator", "queue", "rollouter", "trainer") and not (
                part == "rollouter" and replicas == 0
            ):
                # As Kubernetes makes it: 58 characters of the ReplicaSet's name, and five of its own.
                name = f"{pod.owner['metadata']['name']}-5d9c7b8f64-"[:58] + "x7k2q"
                labels = f'namespace="ns", release="{release}", pod="{name}", job="{part}"'
                series[f"up{{{labels}}}"] = "1x10"
        expression = desired().replace("$namespace", "ns").replace("$release", release)
        checks.append(
            {"expr": expression, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": wanted}]}
        )
    file = tmp_path / "desired.yaml"
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": checks}]
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    monitoring.promtool("test", "rules", file)


@monitoring.needs_promtool
def test_without_kube_state_metrics_targets_are_counted(tmp_path: Path) -> None:
    rollouter = 'namespace="local", release="run", job="rollouter"'
    series = [{"series": f'up{{{rollouter}, pod="rollouter-{n}"}}', "values": "1x10"} for n in range(3)]
    check = {
        "expr": desired().replace("$namespace", "local").replace("$release", "run"),
        "eval_time": "5m",
        "exp_samples": [{"labels": "{}", "value": 3}],
    }
    file = tmp_path / "desired.yaml"
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [check]}]
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    monitoring.promtool("test", "rules", file)
