"""The chart's rules and dashboard: conventions, names that exist, a test for every alert."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.base import Section
from headrace.monitoring import RULES
from headrace.monitoring.dashboard import TARGET, render
from headrace.reference.metrics import services
from tests import monitoring
from tests.monitoring import alerts, names, panel_expressions, promtool, rules, selectors

ROOT = Path(__file__).resolve().parents[3]
UNITS = {"short", "none", "s", "bytes", "Bps", "percentunit", "watt", "sci"}
OTHERS = re.compile(r"vllm:[a-z_]+|up|ALERTS|process_resident_memory_bytes")


@cache
def defined() -> frozenset[str]:
    """Every series name that a service, or a recording rule, makes."""
    out = {rule["record"] for rule in rules() if "record" in rule}
    for found in services().values():
        for name, entry in found.items():
            histogram = entry.type == "histogram"
            out |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if histogram else {name}
    return frozenset(out)


def unknown(expression: str) -> set[str]:
    found = names(expression)
    assert found, expression
    return {n for n in found - defined() - monitoring.ELSEWHERE.keys() if not OTHERS.fullmatch(n)}


# -- the dashboard ------------------------------------------------------------------------------------


def test_dashboard_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_dashboard_keeps_the_conventions() -> None:
    board = monitoring.dashboard()
    assert board["uid"] == "headrace-run"
    assert board["schemaVersion"] >= 39
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "release", "pod"]
    assert variables["pod"]["multi"]
    assert variables["pod"]["includeAll"]
    assert variables["datasource"]["type"] == "datasource"
    # Each is asked for within the one before: a release of the same name may be in another namespace.
    assert variables["namespace"]["definition"] == "label_values(headrace_queue_redis_up, namespace)"
    assert 'namespace=~"$namespace"' in variables["release"]["definition"]
    assert 'namespace=~"$namespace", release=~"$release"' in variables["pod"]["definition"]
    assert all(v["definition"] == v["query"]["query"] for v in variables.values() if v["type"] == "query")
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    titles = [p["title"] for p in panels if p["type"] == "row"]
    assert titles == ["Overview", "Balance", "Staleness", "Queue", "Sync", "vLLM", "Trainer", "GPU"]
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
        if panel["type"] not in ("row", "text"):
            check_panel(panel)


def check_panel(panel: dict[str, Any]) -> None:
    assert panel["targets"], panel["title"]
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] in UNITS, panel["title"]
    references = [t["refId"] for t in panel["targets"]]
    assert len(set(references)) == len(references)
    for target in panel["targets"]:
        expression = target["expr"]
        assert "$namespace" in expression, (panel["title"], expression)
        # A window of fixed length would be empty or coarse at another scrape interval. An hour is a unit.
        assert not re.search(r"(rate|increase)\([^\[]*\[(?!\$__rate_interval|1h\])", expression), expression
        ratio = re.search(r"ratio_rate15m|:ratio\b|kv_cache_usage", expression)
        if ratio and "mappings" not in defaults:
            assert defaults["unit"] == "percentunit", panel["title"]
        # What is drawn by pod is drawn of the pods that were chosen, what belongs to the run whatever they
        # are. GPUs know the pods under another name.
        by_pod = "{{pod}}" in target["legendFormat"] or "takes_total" in expression
        chosen = [s for s in selectors(expression) if 'pod=~"$pod"' in s]
        if by_pod:
            assert chosen == selectors(expression), (panel["title"], expression)
        elif "DCGM" not in expression and "vllm:" not in expression:
            assert chosen == [], (panel["title"], expression)
        for selector in selectors(expression):
            if not selector.startswith("DCGM"):
                assert 'namespace=~"$namespace"' in selector, (panel["title"], selector)
                assert 'release=~"$release"' in selector or "kube_" in selector, (panel["title"], selector)


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in monitoring.dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"], (panel["title"], (x, y))


def test_dashboard_shows_what_exists() -> None:
    assert len(panel_expressions()) > 80
    assert {(panel, n) for panel, e in panel_expressions() for n in unknown(e)} == set()


def test_every_metric_of_ours_is_shown_or_judged() -> None:
    """What nobody looks at needs a reason."""
    read = {n for _, e in panel_expressions() for n in names(e)} | {
        n for r in rules() for n in names(r["expr"])
    }
    read = {re.sub(r"_(bucket|sum|count)$", "", n) for n in read}
    ours = {re.sub(r"_(bucket|sum|count)$", "", n) for n in defined() if n.startswith("headrace_")}
    unread = {name for found in services().values() for name, entry in found.items() if entry.unread}
    assert ours - read == unread


# -- the rules ----------------------------------------------------------------------------------------


def test_the_package_and_the_chart_have_one_file_of_rules() -> None:
    assert RULES.is_symlink()
    assert RULES.resolve() == ROOT / "helm" / "headrace" / "rules" / "headrace.yaml"


def test_rules_read_what_exists() -> None:
    assert {(str(rule), n) for rule in rules() for n in unknown(rule["expr"])} == set()


@pytest.mark.parametrize("name", sorted(alerts()))
def test_an_alert_says_what_to_do(name: str) -> None:
    rule = alerts()[name]
    assert name.startswith("Headrace")
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert "$labels.release" in rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 80
    page, anchor = rule["annotations"]["runbook_url"].split("#")
    assert anchor == name.lower()
    assert f"### {name}\n" in (ROOT / page).read_text(), f"{page} has no section about {name}"


@pytest.mark.parametrize("name", sorted(alerts()))
def test_an_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not(name: str) -> None:
    expected = [
        (int(case["eval_time"].removesuffix("m")), case["exp_samples"], test["name"])
        for file in monitoring.RULE_TESTS
        for test in yaml.safe_load(file.read_text())["tests"]
        for case in test["promql_expr_test"]
        if f'alertname="{name}"' in case["expr"]
    ]
    severity = f'severity="{alerts()[name]["labels"]["severity"]}"'
    assert all(severity in sample["labels"] for _, samples, _ in expected for sample in samples)
    fires = {(minute, test) for minute, samples, test in expected if samples}
    silent = {(minute, test) for minute, samples, test in expected if not samples}
    assert silent
    assert any((minute - 1, test) in silent for minute, test in fires), "not a minute before its time"


def test_tests_of_rules_evaluate_them_in_their_own_order() -> None:
    """promtool takes groups that are not listed in any order, and alerts then see records a minute late."""
    order = [group["name"] for group in yaml.safe_load(RULES.read_text())["groups"]]
    for file in monitoring.RULE_TESTS:
        if file.name != "records.yaml":
            assert yaml.safe_load(file.read_text())["group_eval_order"] == order, file.name


def test_every_recording_rule_has_a_test() -> None:
    text = (monitoring.CHART / "rules" / "tests" / "records.yaml").read_text()
    assert [rule["record"] for rule in rules() if "record" in rule and rule["record"] not in text] == []


def test_documented_alerts_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert set(re.findall(r"^### (Headrace\w+)$", page, re.MULTILINE)) == set(alerts())


def test_descriptions_name_keys_that_exist() -> None:
    """`section.key` in an alert is a key of the configuration."""
    from headrace.config.run import RunConfig

    sections = {
        name: field.annotation.model_fields
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }
    text = " ".join(rule["annotations"]["description"] for rule in alerts().values())
    found = [(s, k) for s, k in re.findall(r"\b([a-z_]+)\.([a-z_]+)\b", text) if s in sections]
    assert len(found) > 5
    assert [f"{s}.{k}" for s, k in found if k not in sections[s]] == []


@monitoring.needs_promtool
def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)


@monitoring.needs_promtool
def test_promtool_runs_the_tests_of_the_rules() -> None:
    assert promtool("test", "rules", *monitoring.RULE_TESTS).count("SUCCESS") == len(monitoring.RULE_TESTS)


@monitoring.needs_promtool
def test_panels_on_the_metrics_of_others(tmp_path: Path) -> None:
    """GPUs of the chosen run's pods only, and named by them."""
    chosen = {"$namespace": "ns", "$release": "a", "$pod": ".*", "$__rate_interval": "5m"}
    cases = []
    for panel, expression in panel_expressions():
        others = names(expression) & monitoring.NEEDS_GPU
        if not others:
            continue
        for variable, value in chosen.items():
            expression = expression.replace(variable, value)
        pods = "namespace='ns', release='{0}', pod='{0}-rollouter-0', job='rollouter'"
        series = {f"up{{{pods.format(release)}}}": "1x10" for release in "ab"}
        for name in others:
            gpu = "exported_namespace='ns', namespace='gpu', pod='dcgm', gpu='0'"
            series[f"{name}{{{gpu}, exported_pod='a-rollouter-0'}}"] = "1+1x10"
            series[f"{name}{{{gpu}, exported_pod='b-rollouter-0'}}"] = "1+1x10"
        labels = "{release='a', job='rollouter', exported_pod='a-rollouter-0'}"
        cases.append(
            {
                "name": panel,
                "interval": "1m",
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f"count by (release, job, exported_pod) ({expression})",
                        "eval_time": "10m",
                        "exp_samples": [{"labels": labels, "value": 1}],
                    }
                ],
            }
        )
    assert len(cases) == len(monitoring.NEEDS_GPU)
    file = tmp_path / "others.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", file)


# -- the reading of expressions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("a", ["a"]),
        ('sum by (x, y) (rate(a_total{b="}", c=~"d.*"}[5m])) / c', ['a_total{b="}", c=~"d.*"}', "c"]),
        ("histogram_quantile(0.99, sum by (le) (rate(a:b_bucket[1m])))", ["a:b_bucket"]),
        ("(a > bool 0.3) + 2 * b unless on (r) c == 1 or vector(0)", ["a", "b", "c"]),
        ('label_replace(up{a="b"}, "x", "$1", "pod", "(.+)")', ['up{a="b"}']),
        ("a * on (x) group_left (y) max by (x) (b)", ["a", "b"]),
    ],
)
def test_selectors_of_an_expression(expression: str, found: list[str]) -> None:
    assert selectors(expression) == found
