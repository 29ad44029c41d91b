"""KEDA gets to the advised number of rollouters, step by step, and stays there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.deploy.helm import charts
from tests.deploy.helm.objects import of_kind
from tests.monitoring import needs_promtool, promtool

TOLERANCE = 0.1
"""Of a HorizontalPodAutoscaler: a ratio of wanted to present pods within it changes nothing."""
STARTS = (1, 2, 5, 8, 9, 10, 11, 30, 100)


def scaled(*sets: str) -> dict[str, Any]:
    (found,) = of_kind(charts.rendered("ci/keda.yaml", sets=sets), "ScaledObject")
    spec: dict[str, Any] = found["spec"]
    return spec


def query() -> str:
    (trigger,) = scaled()["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    found: str = trigger["metadata"]["query"]
    return found


def case(advised: int, there: int, name: str, claims: dict[str, float | None]) -> dict[str, Any]:
    """`claims`: PromQL of QUERY, and its value; None for nothing at all."""
    labels = '{namespace="tests", release="demo", pod="c"}'
    other = '{namespace="tests", release="another", pod="c"}'
    return {
        "name": f"{name}: {advised} advised, {there} take part",
        "interval": "1m",
        "input_series": [
            {"series": f"headrace_recommended_rollouters{labels}", "values": f"{advised}x5"},
            {"series": f"headrace_coordinator_rollouters_taking_part{labels}", "values": f"{there}x5"},
            {"series": f"headrace_recommended_rollouters{other}", "values": "500x5"},
            {"series": f"headrace_coordinator_rollouters_taking_part{other}", "values": "1x5"},
        ],
        "promql_expr_test": [
            {
                "expr": expression.replace("QUERY", f"({query()})"),
                "eval_time": "3m",
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
            for expression, value in claims.items()
        ],
    }


def rests_at(pods: int) -> str:
    """True where an autoscaler with so many pods leaves them."""
    return f"abs(QUERY / {pods} - 1) < bool {TOLERANCE - 1e-6}"


@needs_promtool
def test_a_step_of_one_is_taken_from_any_number_and_no_second_one(tmp_path: Path) -> None:
    cases = []
    for n in STARTS:
        down, up = n - 1, n + 1
        still: dict[str, float | None] = {f"QUERY / {n}": 1.0}
        cases.append(case(n, n, "rests", still))
        # It wants more, from n pods; with n + 1 it rests, whether the new one takes part yet or not.
        more: dict[str, float | None] = {f"QUERY / {n} > bool {1 + TOLERANCE}": 1, rests_at(up): 1}
        cases.append(case(up, n, "up", {rests_at(n): 0, **more}))
        if down:
            fewer: dict[str, float | None] = {f"ceil(QUERY) < bool {n}": 1, rests_at(down): 1}
            cases.append(case(down, n, "down", {rests_at(n): 0, **fewer}))
    # After the start of a coordinator nobody has joined yet: no reason to change anything.
    cases += [case(n, 0, "all start", {rests_at(n): 1}) for n in STARTS]
    cases.append(case(0, 3, "no advice", {"QUERY": None}))
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", file)


def test_one_pod_at_a_time_and_each_direction_has_its_own_patience() -> None:
    behavior = scaled()["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleUp"] == {
        "stabilizationWindowSeconds": 60,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    }
    assert behavior["scaleDown"] == {
        "stabilizationWindowSeconds": 600,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 600}],
    }


def test_without_advice_the_number_stays() -> None:
    """No series, or no Prometheus: a number that nobody advised is none to go to."""
    spec = scaled()
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["ignoreNullValues"] == "false", "an empty answer is an error, not a zero"
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 2, "behavior": "currentReplicas"}
    assert spec["advanced"]["restoreToOriginalReplicaCount"] is False


def test_prometheus_is_the_one_of_the_values() -> None:
    address, ref = "https://thanos.example:9090", {"name": "thanos", "kind": "ClusterTriggerAuthentication"}
    spec = scaled(
        f"autoscaling.prometheusAddress={json.dumps(address)}",
        f"autoscaling.authenticationRef={json.dumps(ref)}",
        'autoscaling.authModes="bearer"',
        'autoscaling.query="vector(3)"',
        "autoscaling.pollingInterval=30",
    )
    (trigger,) = spec["triggers"]
    assert trigger["authenticationRef"] == ref
    assert (
        trigger["metadata"] | {"serverAddress": address, "query": "vector(3)", "authModes": "bearer"}
        == (trigger["metadata"])
    )
    assert spec["pollingInterval"] == 30
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 12)
    (plain,) = scaled()["triggers"]
    assert "authenticationRef" not in plain
    assert "authModes" not in plain["metadata"]
