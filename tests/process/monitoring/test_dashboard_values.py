"""What the dashboard's panels show of a run whose numbers are known, and what they advise about it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from headrace.monitoring import RULES
from headrace.monitoring.rows_balance import _WHAT_TO_DO
from headrace.service.recommendation import WindowReading, wanted
from tests import monitoring
from tests.monitoring import promtool

RUN = 'namespace="ns", release="r"'
OTHER = 'namespace="elsewhere", release="r"'
"""A run of the same name in another namespace, with other numbers."""


def numbers(run: str, waits: int, busy: tuple[int, int]) -> dict[str, str]:
    """Series of a run whose trainer waits so many seconds of a minute, and whose engines are so busy."""
    out = {
        f'headrace_trainer_wait_seconds_total{{{run}, pod="t"}}': f"0+{waits}x40",
        f'headrace_trainer_step_seconds_total{{{run}, pod="t"}}': "0+60x40",
        f'headrace_samples_trained_total{{{run}, pod="t"}}': "0+40x40",
        f'headrace_stale_samples_trained_total{{{run}, pod="t"}}': "0+10x40",
        f'headrace_queue_restarted_total{{{run}, pod="q"}}': "0+3x40",
        f'headrace_reward_call_seconds_bucket{{{run}, pod="r-0", le="2"}}': "0+10x40",
        f'headrace_reward_call_seconds_bucket{{{run}, pod="r-0", le="4"}}': "0+20x40",
        f'headrace_reward_call_seconds_bucket{{{run}, pod="r-0", le="+Inf"}}': "0+20x40",
    }
    for number, seconds in enumerate(busy):
        pod = f'{run}, pod="r-{number}"'
        out[f"headrace_rollouter_active_seconds_total{{{pod}}}"] = f"0+{seconds}x40"
        out[f"headrace_rollouter_window_seconds_total{{{pod}}}"] = "0+60x40"
        out[f"vllm:num_requests_running{{{pod}}}"] = f"{number + 3}x40"
    return out


def case(shown: dict[tuple[str, str], list[tuple[str, float]]], waits: int, busy: tuple[int, int]) -> object:
    """promtool's test of panels: (title, legend) -> (labels, value) of what it draws, of pod r-0 only."""
    values = {"$__rate_interval": "5m", "$namespace": "ns", "$release": "r", "$pod": "r-0"}
    checks = []
    for (title, legend), samples in shown.items():
        (panel,) = [p for p in monitoring.dashboard()["panels"] if p["title"] == title]
        (expression,) = [t["expr"] for t in panel["targets"] if t["legendFormat"] == legend]
        for variable, value in values.items():
            expression = expression.replace(variable, value)
        expected = [{"labels": f"{{{labels}}}", "value": value} for labels, value in samples]
        # Rounded: rates are quotients of floating point.
        checks.append(
            {"expr": f"round({expression}, 0.001)", "eval_time": "40m", "exp_samples": expected},
        )
    series = numbers(RUN, waits, busy) | numbers(OTHER, 60 - waits, (1, 2))
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": v} for name, v in series.items()],
        "promql_expr_test": checks,
    }


def verdict(waits: int, busy: int, value: int) -> object:
    return case({("Who waits", "{{release}}"): [(RUN, value)]}, waits, (busy, busy))


@monitoring.needs_promtool
def test_panels_draw_what_they_say(tmp_path: Path) -> None:
    cases = [
        case(
            {
                ("Trainer idle", "{{release}}"): [(RUN, 0.2)],
                ("Rollouters idle", "{{release}}"): [(RUN, 0.25)],
                ("Stale samples", "{{release}}"): [(RUN, 0.25)],
                ("Idle", "trainer"): [('release="r"', 0.2)],
                ("Idle", "rollouters"): [('release="r"', 0.25)],
                ("Idle by rollouter", "{{pod}}"): [(f'{RUN}, pod="r-0"', 0.1)],
                ("Requests running", "{{pod}}"): [('pod="r-0"', 3)],
                ("Seconds of the reward", "p50"): [('release="r"', 2)],
                ("Seconds of the reward", "p99"): [('release="r"', 3.96)],
                ("Put back", "too old to continue"): [('release="r"', 15)],
            },
            12,
            (54, 36),
        ),
        verdict(6, 54, 0),
        verdict(30, 54, 1),
        verdict(6, 30, 2),
        verdict(30, 30, 3),
    ]
    file = tmp_path / "panels.yaml"
    order = [group["name"] for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]]
    head = {"rule_files": [str(RULES.resolve())], "group_eval_order": order, "evaluation_interval": "1m"}
    file.write_text(yaml.safe_dump(head | {"tests": cases}))
    promtool("test", "rules", file)


WHO = {(True, False): "rollout", (False, True): "trainer", (True, True): "sync", (False, False): "balanced"}
"""(trainer idle, rollouters idle) -> who needs more, or what to look at."""


def test_the_verdict_names_who_needs_more() -> None:
    (panel,) = [p for p in monitoring.dashboard()["panels"] if p["title"] == "Who waits"]
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    for (trainer, rollouters), word in WHO.items():
        text = mapping["options"][str(trainer + 2 * rollouters)]["text"]
        assert word in text.split(": ")[-1], text


def test_tables_of_what_to_do_agree_with_the_recommendation() -> None:
    """On the dashboard and in the documentation, row by row."""
    page = (monitoring.CHART.parents[1] / "docs" / "operations.md").read_text()
    for text in (_WHAT_TO_DO, page):
        rows = re.findall(r"^\| (high|low) \| (high|low) \| (.*) \|$", text, re.MULTILINE)
        assert len(rows) == 4
        for trainer, rollouters, advice in rows:
            high = trainer == "high", rollouters == "high"
            assert WHO[high] in advice.split("GPUs to the ")[-1], advice
    share = {True: 0.6, False: 0.1}
    for (trainer_idle, rollouters_idle), word in WHO.items():
        best = wanted(WindowReading(share[trainer_idle], share[rollouters_idle], 8))
        assert (best > 8.1, best < 7.9) == (word == "rollout", word == "trainer")
