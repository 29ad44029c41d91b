"""Render the page: header, tables, charts, samples. Everything that comes from a run is escaped."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from html import escape
from importlib import resources

from headrace.records.sample_dump import Kept
from headrace.records.summary import version_gaps
from headrace.records.token_text import shown
from headrace.report import catalogue, chart, tables
from headrace.report.collect import RunData

LONGEST_TEXT = 2000
"""Most characters shown of a prompt or a response."""
_KINDS = {
    "best": "highest reward",
    "worst": "lowest reward",
    "longest": "longest",
    "last": "trained last",
}


def render(runs: Sequence[RunData], now: float | None = None) -> str:
    """The whole page as HTML. `now`: seconds since the epoch, shown as the page's date."""
    style, script = _asset("page.css"), _asset("page.js")
    title = "Headrace: " + ", ".join(run.label for run in runs)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"{_header(runs, now)}\n{_bar(runs)}\n{_sections(runs)}\n</main>\n"
        f'<div id="tip" role="status"></div>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("headrace.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _header(runs: Sequence[RunData], now: float | None) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    on = [run.label for run in runs if run.state == "running"]
    live = f" Still on, and shown as far as they had come: {', '.join(on)}." if on else ""
    heading = f"Run {runs[0].label}" if len(runs) == 1 else f"{len(runs)} runs side by side"
    return (
        f'<header><h1>{escape(heading)}</h1><p class="lead">Made on {when}.{escape(live)}</p></header>'
        f"<h2>Overview</h2>{tables.overview(runs)}{_settings(runs)}"
    )


def _settings(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        what, opened = "Settings that are not at their default", ""
    else:
        what, opened = "Settings that differ", " open"
    return f"<details{opened}><summary>{what}</summary>{tables.settings(runs)}</details>"


def _bar(runs: Sequence[RunData]) -> str:
    """The bar that stays visible: the choice of the x axis, and the runs' colours."""
    keys = "".join(f"<li>{tables.run_name(i, run)}</li>" for i, run in enumerate(runs))
    legend = f'<ul class="legend">{keys}</ul>' if len(runs) > 1 else ""
    return (
        '<div class="bar"><fieldset><legend>x axis</legend>'
        '<label><input type="radio" name="x" id="x-step" checked>steps</label>'
        '<label><input type="radio" name="x" id="x-wall">wall clock</label>'
        f"</fieldset>{legend}</div>"
    )


def _sections(runs: Sequence[RunData]) -> str:
    several = len(runs) > 1
    stacks = "".join(
        chart.phases(run, f"Phases of a step: {run.label}" if several else "Phases of a step") for run in runs
    )
    gaps = chart.bars(
        "Version gaps of all trained samples", "versions", {run.label: _gap_shares(run) for run in runs}
    )
    out = [
        _charts("Learning", runs, [*catalogue.held_out(runs), *catalogue.section("Learning")]),
        _charts("Where the time goes", runs, catalogue.section("Where the time goes"), before=stacks),
        _charts("Staleness", runs, catalogue.section("Staleness"), after=gaps),
        _charts("Lengths", runs, catalogue.section("Lengths")),
    ]
    if by_outcome := tables.lengths(runs):
        out.append(
            "<h2>Tokens of samples by outcome</h2>"
            f'{by_outcome}<p class="about">Prompt and all responses of a group. Outcomes that differ in '
            "length bias what is trained. “Recorded”: of the samples that the run kept.</p>"
        )
    out += [
        _charts("Queue", runs, catalogue.section("Queue")),
        _charts("Sync", runs, catalogue.section("Sync")),
        _charts("Policy", runs, catalogue.section("Policy")),
        _samples(runs),
    ]
    if not any(run.updates for run in runs):
        out.insert(0, "<p>No update has been trained yet, so there is nothing to draw.</p>")
    return "\n".join(part for part in out if part)


def _charts(
    title: str,
    runs: Sequence[RunData],
    charts: Sequence[catalogue.Lines],
    before: str = "",
    after: str = "",
) -> str:
    drawn = before + "".join(chart.lines(c, runs) for c in charts) + after
    return f'<section><h2>{escape(title)}</h2><div class="charts">{drawn}</div></section>' if drawn else ""


def _gap_shares(run: RunData) -> dict[int, float]:
    gaps = version_gaps(run.updates)
    total = sum(gaps.values())
    return {int(gap): count / total for gap, count in gaps.items()} if total else {}


# -- samples ----------------------------------------------------------------------------------------------


def _samples(runs: Sequence[RunData]) -> str:
    out = ""
    for index, run in enumerate(runs):
        cards = "".join(_card(kind, kept, run) for kind, found in run.samples.items() for kept in found)
        if cards:
            opened = " open" if index == 0 else ""
            out += (
                f"<details{opened}><summary>{escape(run.label)}</summary>"
                f'<div class="samples">{cards}</div></details>'
            )
    if not out:
        return ""
    return (
        f'<section><h2>Samples</h2>{out}<p class="about">The colour under a response is the policy version '
        "that wrote it; what is grey came from an environment. `headrace samples` shows more.</p></section>"
    )


def _card(kind: str, kept: Kept, run: RunData) -> str:
    oldest = min((v for v, _, _ in kept.segments), default=kept.version)
    left, response = LONGEST_TEXT, ""
    written: dict[str, int] = {}
    for version, start, end in kept.pieces:
        writer = "environment" if version is None else f"version {version}"
        css = "env" if version is None else f"seg{(version - oldest) % 4}"
        written[writer] = written.get(writer, 0) + end - start
        if left <= 0:
            continue
        text = _short(shown(kept.response_ids[start:end], run.decode), left)
        left -= len(text)
        response += f'<span class="{css}" title="{writer}">{escape(text)}</span>'
    versions = ", ".join(f"{writer.replace('version ', 'v')}: {count}" for writer, count in written.items())
    parts = "".join(f", {escape(name)} {value:.3g}" for name, value in kept.reward_parts.items())
    advantage = f", advantage {kept.advantage:+.2f}" if kept.advantage is not None else ""
    return (
        f'<article class="card"><h3><span>{_KINDS[kind]}</span><span>reward {kept.reward:.3f}</span></h3>'
        f"<pre>{escape(_short(shown(kept.prompt_ids, run.decode), LONGEST_TEXT))}</pre><pre>{response}</pre>"
        f'<p class="facts">{escape(kept.data_source)}{parts}{advantage}; step {kept.step}, version gap '
        f"{kept.gap}; {len(kept.response_ids)} tokens ({versions}), ended by {escape(kept.finish)}"
        + (f"; truth: {escape(_short(kept.ground_truth, 200))}" if kept.ground_truth else "")
        + "</p></article>"
    )


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(0, limit)] + "…"
