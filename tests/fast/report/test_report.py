"""The report page: everything a run left is on it, nothing is fetched, and hostile text stays text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from headrace.cli.main import main
from headrace.metrics import row_keys
from headrace.metrics.sync_and_eval import SYNC_ROW
from headrace.metrics.views import Section
from headrace.records.layout import RunLayout
from headrace.records.sample_dump import DIRECTORY
from headrace.records.summary import ledger_line
from headrace.report import catalogue, tables
from headrace.report.chart import rolling_max, rolling_mean, thinned
from headrace.report.collect import RunData, collect, labels, path_of
from headrace.report.page import render
from headrace.report.scale import Scale, limits, without_outliers, written

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"
KNOWN = row_keys.TABLE.entries.keys()


def make_run(root: Path, steps: int = 40, **config: Any) -> RunLayout:
    """A directory as a run leaves it, with every key that the run log defines."""
    root.mkdir(parents=True)
    numbers = sorted(KNOWN - {"staleness/version_gap/hist", "fully_async/count/current_param_version"})
    with (root / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row: dict[str, Any] = {key: 0.01 * step + 0.001 * i for i, key in enumerate(numbers)}
            row |= {"step": step, "wall_s": 2.0 * step, "timing_s/step": 2.0, "lineage": 1}
            row["staleness/version_gap/hist"] = {"0": 3, "1": 1}
            row["fully_async/count/current_param_version"] = step // 2
            file.write(json.dumps(row) + "\n")
    versions = range(steps // 2 + 1)
    keys = ("pause_s", "transfer_s", "commit_s", "total_s", "interval_s", "logprob_max_abs_diff")
    syncs = [{"version": v, "members": 2, **dict.fromkeys(keys, 0.1 + 0.01 * v)} for v in versions]
    (root / "sync.jsonl").write_text("".join(json.dumps(row) + "\n" for row in syncs))
    evals = [{"version": v, "data_source": HOSTILE, "reward": v / 20, "n": 9} for v in versions if v % 5 == 0]
    (root / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    (root / "config.yaml").write_text(yaml.safe_dump({"name": "x", "rollout": {"n": 8}, **config}))
    (root / "summary.json").write_text(
        json.dumps(
            {
                "status": "failed",
                "reason": HOSTILE,
                "wall_s": 90,
                "lengths": {"trained": {"samples": 5, "mean": 30.0, "largest": 44}},
            }
        )
    )
    trajectory = {"reward": 1.0, "finish": "stop", "segments": [[0, 0, 1], [1, 1, 2]], "response_ids": [3, 4]}
    line = {
        "step": 1, "version": 1, "lineage": 1, "sample_id": "0", "epoch": 0, "row": 0, "data_source": HOSTILE,
        "ground_truth": HOSTILE, "owner": "o", "attempt": 2, "generate_s": 0.1, "prompt_ids": [1, 2],
        "trajectories": [trajectory],
    }  # fmt: skip
    (root / DIRECTORY).mkdir()
    (root / DIRECTORY / "0-000000.jsonl").write_text(json.dumps(line) + "\n")
    return RunLayout(root)


class Page(HTMLParser):
    """The elements of a page; fails on tags that do not close."""

    VOID = frozenset({"meta", "link", "img", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h3":
            self.titles.append(data)


def page_of(*layouts: RunLayout) -> str:
    return render(collect(layouts, [lambda ids: HOSTILE + str(list(ids))] * len(layouts)))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(make_run(tmp_path_factory.mktemp("runs") / HOSTILE.replace("/", "∕")))


def test_every_chart_is_there_with_its_curves(one: str) -> None:
    run = Page(one)
    charts = [chart for title in get_args(Section) for chart in catalogue.section(title)]
    wanted = [c.title for c in charts] + [f"Held-out score: {HOSTILE}", "Phases of a step"]
    assert [title for title in wanted if title not in run.titles] == []
    for chart in charts:
        svg = one.split(f'aria-label="{chart.title}"')[1].split("</svg>")[0]
        for axis in ("by-step", "by-wall"):
            group = svg.split(f'class="{axis}"')[1].split("</g>")[0]
            curves = re.findall(r'data-name="[^"]+" d="M([^"]+)"', group)
            assert len(curves) == len(chart.keys), (chart.title, axis)
            assert all(len(curve.split()) >= 2 * 20 for curve in curves), chart.title


def test_keys_of_the_charts_are_keys_of_the_run_log() -> None:
    keys = {f"timing_s/{phase}" for phase in catalogue.PHASES}
    for title in get_args(Section):
        for chart in catalogue.section(title):
            of_rounds = chart.read is catalogue.sync_series
            keys |= {f"sync.jsonl {key}" if of_rounds else key for key, _ in chart.keys}
    assert keys <= KNOWN | {f"sync.jsonl {key.name}" for key in SYNC_ROW}


def test_nothing_is_fetched_and_nothing_of_a_run_is_markup(one: str) -> None:
    page = Page(one)
    assert not re.search(r"(?:src|href|url|@import|fetch|XMLHttp)[^\n]{0,20}//", one)
    urls = [value for _, attrs in page.elements for key, value in attrs.items() if key in ("src", "href")]
    assert urls == ["data:,"]
    assert [tag for tag, _ in page.elements if tag in ("img", "iframe", "object", "base", "form")] == []
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert not any(key.startswith("on") or key == "style" for _, attrs in page.elements for key in attrs)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_runs_side_by_side(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a" / "x", rollout={"n": 8, "temperature": 1.0}, seed=1)
    b = make_run(tmp_path / "b" / "x", steps=30, rollout={"n": 4}, seed=1)
    text = page_of(a, b)
    assert Page(text).titles.count("Reward") == 1
    assert 'data-name="a/x"' in text
    assert 'data-name="b/x"' in text
    assert "Phases of a step: a/x" in text
    runs = collect([a, b], [None, None])
    assert tables.differences(runs) == [
        ("rollout.n", [8, 4]),
        ("rollout.temperature", [1.0, tables._MISSING]),
    ]


def test_one_run_shows_what_is_not_at_its_default(tmp_path: Path) -> None:
    (run,) = collect([make_run(tmp_path / "x", rollout={"n": 8, "temperature": 0.7})], [None])
    assert tables.unlike_default(run) == [("rollout.temperature", 0.7)]


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "sync.jsonl", "eval.jsonl", "summary.json", "config.yaml"]
)
def test_a_file_may_be_missing_or_broken(tmp_path: Path, missing: str) -> None:
    layout = make_run(tmp_path / "x")
    (layout.root / missing).write_text("{")
    Page(page_of(layout))
    (layout.root / missing).unlink()
    Page(page_of(layout))


@pytest.mark.parametrize("steps", [0, 1, 2, 1000])
def test_few_rows_and_many(tmp_path: Path, steps: int) -> None:
    text = page_of(make_run(tmp_path / "x", steps=steps))
    Page(text)
    assert len(text) < 1_500_000
    assert ("nothing to draw" in text) == (steps == 0)


def test_odd_values_are_passed_over(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "x", steps=3)
    rows = '{"step": 4, "wall_s": 9, "reward/mean": NaN, "actor/entropy": "x", "sync/total_s": null}\n'
    with layout.metrics.open("a") as file:
        file.write(rows + '{"step": 5}\n{"step": 6, "wall_s"')
    Page(page_of(layout))


def test_a_summary_that_is_not_whole(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "x", steps=3)
    rest = {"wall_s": 90, "ledger": {"trained": 3}, "lengths": {"trained": {"samples": 5}, "dead": None}}
    layout.summary.write_text(json.dumps({"status": "failed", **rest}))
    Page(page_of(layout))
    assert ledger_line(json.loads(layout.summary.read_text())) == ""


def test_what_an_environment_wrote_is_told_from_the_policy_s(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "x", steps=3)
    file = layout.root / DIRECTORY / "0-000000.jsonl"
    row = json.loads(file.read_text())
    row["trajectories"][0] |= {
        "response_ids": [3, 4, 5, 6], "segments": [[0, 0, 3], [1, 3, 4]], "loss_mask": [1, 0, 0, 1],
    }  # fmt: skip
    odd = {**row, "trajectories": [{**row["trajectories"][0], "advantage": "high"}]}
    file.write_text(f"{json.dumps(row)}\n{json.dumps(odd)}\n")
    text = page_of(layout)
    spans = re.findall(r'<span class="(env|seg\d)" title="([a-z 0-9]+)">[^<]*\[([0-9, ]+)\]</span>', text)
    assert spans[:3] == [
        ("seg0", "version 0", "3"), ("env", "environment", "4, 5"), ("seg1", "version 1", "6"),
    ]  # fmt: skip
    assert "4 tokens (v0: 1, environment: 2, v1: 1)" in text


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs" / "x")
    common = ["--runs-dir", str(tmp_path / "runs")]
    with pytest.raises(SystemExit) as ended:
        main(["report", "x", str(tmp_path / "runs" / "x"), "--out", str(tmp_path / "p.html"), *common])
    assert ended.value.code == 0
    assert "<h1>Run x</h1>" in (tmp_path / "p.html").read_text(), "the same run named twice is one"
    with pytest.raises(SystemExit) as ended:
        main(["report", "x", "y", *common])
    assert ended.value.code == 2
    assert "known there: x" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["report", "x", "--out", str(tmp_path / "nowhere" / "p.html"), *common])
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main(["report", "x", "--out", str(tmp_path), *common])
    assert ended.value.code == 2
    assert "is a directory: name a file in it" in capsys.readouterr().err


def test_steps_that_were_taken_back_are_not_drawn() -> None:
    rows = [{"step": s, "lineage": 1} for s in (1, 2, 3, 4)] + [{"step": s, "lineage": 2} for s in (3,)]
    assert [(r["step"], r["lineage"]) for r in path_of(rows)] == [(1, 1), (2, 1), (3, 2)]


def test_versions_stand_where_they_came_into_use(tmp_path: Path) -> None:
    (run,) = collect([make_run(tmp_path / "x")], [None])
    points = run.scores(HOSTILE)
    assert [(p.step, p.wall_s) for p in points[:3]] == [(0, 0), (10, 20), (20, 40)]


def test_labels_tell_runs_apart() -> None:
    roots = [Path("/a/x/run"), Path("/b/x/run"), Path("/b/y/run")]
    assert labels([RunLayout(r) for r in roots]) == ["a/x/run", "b/x/run", "b/y/run"]
    assert labels([RunLayout(Path("/a/one")), RunLayout(Path("/a/two"))]) == ["one", "two"]


def test_axes() -> None:
    assert limits([0.2, 0.9]) == (0.0, pytest.approx(0.972, abs=0.02))
    assert limits([5.0, 5.0])[0] < 5 < limits([5.0, 5.0])[1]
    assert limits([0.0, 0.0]) == (0.0, 1.0)
    assert Scale(0, 10, 0, 1).ticks(5) == [0, 2, 4, 6, 8, 10]
    assert Scale(1e-6, 1e-3, 0, 1, log=True).ticks() == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3])
    assert Scale(1e-6, 1e-2, 0, 100, log=True)(1e-4) == pytest.approx(50)
    assert without_outliers([1.0] * 50 + [90.0]) == 1.25
    assert without_outliers([1.0] * 50 + [2.0]) is None
    assert [written(v) for v in (0, 0.5, 12345, 2e7, 1e-6)] == ["0", "0.5", "12.35 k", "20 M", "1e-6"]
    assert rolling_mean([1, 2, 3, 4], 3) == [1.5, 2, 3, 3.5]
    assert rolling_max([1, 5, 3, 4], 3) == [5, 5, 5, 4]
    assert thinned(list(range(1000)), [1.0] * 999 + [7.0], largest=True)[1][-1] == 7.0
    assert RunData("", Path(), "").series("reward/mean") == []
