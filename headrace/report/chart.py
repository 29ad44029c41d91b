"""Draw one chart as SVG. It has each curve twice, over steps and over wall clock; the page shows one of them.

Colours are CSS classes (`c0`..: runs or keys; `p0`..: phases), set in `page.css` for light and dark mode. For
the numbers under the pointer, the script reads the paths and the axes' `data-` attributes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from headrace.metrics import row_keys
from headrace.report.catalogue import PHASES, Lines
from headrace.report.collect import Point, RunData, number, place
from headrace.report.scale import Scale, limits, nice_step, wall_unit, without_outliers, written

WIDTH, HEIGHT = 440, 236
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 36
COLOURS = 6
MOST_POINTS, MOST_COLUMNS = 240, 80
_RIGHT_X, _BOTTOM_Y = WIDTH - RIGHT, HEIGHT - BOTTOM


@dataclass(frozen=True)
class Curve:
    name: str
    points: list[Point]
    colour: str
    dash: int = 0
    key: int = 0
    """Index of the chart's key."""
    largest: bool = False
    """Thin out by the maximum of neighbours instead of their mean."""


def lines(chart: Lines, runs: Sequence[RunData]) -> str:
    """The figure; an empty string if no run has data for it."""
    curves = []
    several = len(runs) > 1
    for number_of_run, run in enumerate(runs):
        for number_of_key, (key, name) in enumerate(chart.keys):
            points = chart.read(run, key)
            if points:
                colour = number_of_run if several else number_of_key
                label = name if not several else run.label if len(chart.keys) == 1 else f"{run.label}: {name}"
                dash = number_of_key if several else 0
                curves.append(
                    Curve(label, points, f"c{colour % COLOURS}", dash, number_of_key, key.endswith("/max"))
                )
    if not curves:
        return ""
    values = [p.value for c in curves for p in c.points]
    if chart.log:
        curves = [replace(c, points=[p for p in c.points if p.value > 0]) for c in curves]
    low, high = limits(values, chart.percent, chart.log)
    clipped = without_outliers(values) if chart.unit in ("s", "tokens/s") and low >= 0 else None
    note = f"Cut off at {written(clipped)}; the largest is {written(max(values))}." if clipped else ""
    y = Scale(low, clipped or high, _BOTTOM_Y, TOP, chart.log)
    groups = ""
    for axis in ("step", "wall"):
        x, unit, factor = _x_axis(axis, [p for c in curves for p in c.points])
        drawn = ""
        for curve in curves:
            xs = [(p.step if axis == "step" else p.wall_s / factor) for p in curve.points]
            ys = [p.value for p in curve.points]
            if chart.smooth and len(ys) >= 20:
                width = max(3, len(ys) // 20)
                if curve.largest:
                    ys = rolling_max(ys, width)
                else:
                    drawn += _path(x, y, *thinned(xs, ys), f"raw {curve.colour}")
                    ys = rolling_mean([min(v, clipped) for v in ys] if clipped else ys, width)
            css = f"line {curve.colour} d{curve.dash}"
            drawn += _path(x, y, *thinned(xs, ys, curve.largest), css, curve.name)
            if chart.marks or len(xs) == 1:
                drawn += "".join(
                    f'<circle class="f-{curve.colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6"/>'
                    for a, b in zip(xs, ys, strict=True)
                )
        groups += _group(axis, x, unit, drawn)
    legend = []
    if len(chart.keys) > 1:  # the page's legend shows the runs' colours
        used = {c.key for c in curves}
        legend = [
            (name, "plain", i) if several else (name, f"c{i % COLOURS}", 0)
            for i, (_, name) in enumerate(chart.keys)
            if i in used
        ]
    about = f"{chart.about} {note}".strip()
    return figure(chart.title, chart.unit, _svg(chart.title, y, chart.percent, groups), legend, about)


def phases(run: RunData, title: str) -> str:
    """Seconds of each phase, stacked, over steps."""
    rows = [
        (at, row) for row in run.updates if (at := place(row)) and number(row.get(row_keys.TIMING_S_STEP))
    ]
    if not rows:
        return ""
    layers: dict[str, list[float]] = {}
    for name in PHASES:
        seconds = [number(row.get(f"timing_s/{name}")) or 0.0 for _, row in rows]
        if any(seconds):
            layers[name] = seconds
    total = [number(row.get(row_keys.TIMING_S_STEP)) or 0.0 for _, row in rows]
    known = [sum(column) for column in zip(*layers.values(), strict=True)] if layers else [0.0] * len(rows)
    layers["other"] = [max(0.0, t - k) for t, k in zip(total, known, strict=True)]
    clipped = without_outliers(total)
    note = (
        f"Cut off at {written(clipped)} s; the longest step took {written(max(total))} s." if clipped else ""
    )
    y = Scale(0.0, clipped or max(total) * 1.05, _BOTTOM_Y, TOP)
    groups = ""
    for axis in ("step", "wall"):
        points = [Point(*at, 0.0) for at, _ in rows]
        x, unit, factor = _x_axis(axis, points)
        xs = [p.step if axis == "step" else p.wall_s / factor for p in points]
        below = [0.0] * len(xs)
        drawn = ""
        for name, seconds in layers.items():
            above = [a + b for a, b in zip(below, seconds, strict=True)]
            label, colour = PHASES.get(name, ("everything else", "p7"))
            drawn += _area(x, y, xs, below, above, colour, label)
            below = above
        groups += _group(axis, x, unit, drawn)
    legend = [(*PHASES.get(name, ("everything else", "p7")), -1) for name in layers]
    return figure(title, "s per step", _svg(title, y, False, groups, "stack"), legend, note)


def bars(title: str, unit: str, shares: Mapping[str, Mapping[int, float]], about: str = "") -> str:
    """The share of each whole number, as one bar per run; `shares` by run label."""
    shares = {label: share for label, share in shares.items() if share}
    if not shares:
        return ""
    first = min(min(share) for share in shares.values())
    last = max(max(share) for share in shares.values())
    x = Scale(first - 0.5, last + 0.5, LEFT, _RIGHT_X)
    y = Scale(0.0, max(max(share.values()) for share in shares.values()) * 1.1, _BOTTOM_Y, TOP)
    width = (x(1) - x(0)) * 0.8 / len(shares)
    drawn = ""
    for i, (label, share) in enumerate(shares.items()):
        for value, part in sorted(share.items()):
            left = x(value - 0.4) + i * width
            tip = f"{label}: {value} {unit}, {written(part, percent=True)}"
            drawn += (
                f'<rect class="f-c{i % COLOURS}" x="{left:.1f}" y="{y(part):.1f}" '
                f'width="{max(width - 1, 0.5):.1f}" height="{_BOTTOM_Y - y(part):.1f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
    ticks = range(first, last + 1, max(1, int(nice_step(max(1.0, (last - first) / 10)))))
    axis = "".join(f'<text class="x" x="{x(t):.1f}" y="{_BOTTOM_Y + 14}">{t}</text>' for t in ticks)
    axis += f'<text class="x name" x="{(LEFT + _RIGHT_X) / 2}" y="{HEIGHT - 6}">{escape(unit)}</text>'
    return figure(title, "share of samples", _svg(title, y, True, axis + drawn), [], about)


def figure(title: str, unit: str, svg: str, legend: Sequence[tuple[str, str, int]], about: str = "") -> str:
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 22 10" aria-hidden="true">{_swatch(colour, dash)}</svg>'
        f"{escape(name)}</li>"
        for name, colour, dash in legend
    )
    return (
        f'<figure><figcaption><h3>{escape(title)}</h3><span class="unit">{escape(unit)}</span></figcaption>'
        f"{svg}"
        + (f'<ul class="legend">{keys}</ul>' if keys else "")
        + (f'<p class="about">{escape(about)}</p>' if about else "")
        + "</figure>"
    )


def _swatch(colour: str, dash: int) -> str:
    if dash < 0:
        return f'<rect class="f-{colour}" x="3" y="0" width="14" height="10" rx="2"/>'
    return f'<path class="line {colour} d{dash}" d="M0 5H22"/>'


# -- parts ------------------------------------------------------------------------------------------------


def _svg(title: str, y: Scale, percent: bool, inner: str, kind: str = "lines") -> str:
    grid = ""
    for tick in y.ticks():
        at = y(tick)
        grid += (
            f'<path class="grid" d="M{LEFT} {at:.1f}H{_RIGHT_X}"/>'
            f'<text class="y" x="{LEFT - 6}" y="{at + 3.5:.1f}">{escape(written(tick, percent))}</text>'
        )
    data = (
        f'data-low="{y.low!r}" data-high="{y.high!r}" data-log="{int(y.log)}" data-percent="{int(percent)}"'
    )
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f"{data}>{grid}{inner}</svg>"
    )


def _x_axis(axis: str, points: Sequence[Point]) -> tuple[Scale, str, float]:
    """The axis over all points, its unit, and the seconds of that unit."""
    if axis == "step":
        values, unit, factor = [p.step for p in points], "step", 1.0
    else:
        factor, unit = wall_unit(max((p.wall_s for p in points), default=0.0))
        values = [p.wall_s / factor for p in points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = 0.0 if low < 0.3 * high else low
    return Scale(low, high if high > low else low + 1.0, LEFT, _RIGHT_X), unit, factor


def _group(axis: str, x: Scale, unit: str, drawn: str) -> str:
    name = "step" if axis == "step" else f"wall clock, {unit}"
    ticks = "".join(
        f'<text class="x" x="{x(t):.1f}" y="{_BOTTOM_Y + 14}">{escape(written(t))}</text>' for t in x.ticks(6)
    )
    return (
        f'<g class="by-{axis}" data-low="{x.low!r}" data-high="{x.high!r}" data-unit="{escape(unit)}">'
        f'{ticks}<text class="x name" x="{(LEFT + _RIGHT_X) / 2}" y="{HEIGHT - 6}">{name}</text>{drawn}</g>'
    )


def _path(x: Scale, y: Scale, xs: Sequence[float], ys: Sequence[float], css: str, name: str = "") -> str:
    points = " ".join(f"{x(a):.1f} {_within(y(b)):.1f}" for a, b in zip(xs, ys, strict=True))
    label = f' data-name="{escape(name)}"' if name else ""
    return f'<path class="{css}"{label} d="M{points}"/>' if points else ""


def _area(
    x: Scale,
    y: Scale,
    xs: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    colour: str,
    name: str,
) -> str:
    """A layer of a stack, and its invisible upper edge for the script to read."""
    at, low = thinned(xs, below, most=MOST_COLUMNS)
    _, high = thinned(xs, above, most=MOST_COLUMNS)
    if len(at) == 1:  # one step alone has no width
        at, low, high = [x.low, x.high], low * 2, high * 2
    edge = " ".join(f"{x(a):.1f} {_within(y(b)):.1f}" for a, b in zip(at, high, strict=True))
    back = " ".join(
        f"{x(a):.1f} {_within(y(b)):.1f}" for a, b in zip(reversed(at), reversed(low), strict=True)
    )
    return (
        f'<path class="area f-{colour}" d="M{edge} L{back}Z"/>'
        f'<path class="edge" data-name="{escape(name)}" d="M{edge}"/>'
    )


def _within(pixel: float) -> float:
    """Clip a value to the edge of the axis."""
    return min(max(pixel, TOP), _BOTTOM_Y)


def thinned(
    xs: Sequence[float], ys: Sequence[float], largest: bool = False, most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most `most` points: neighbours become their mean (or the largest of them)."""
    if len(xs) <= most:
        return list(xs), list(ys)
    cuts = [len(xs) * i // most for i in range(most + 1)]
    parts = [(xs[a:b], ys[a:b]) for a, b in itertools.pairwise(cuts)]
    out_y = [max(b) if largest else sum(b) / len(b) for _, b in parts]
    return [sum(a) / len(a) for a, _ in parts], out_y


def rolling_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and its neighbours: `width` values, fewer at the ends."""
    half, sums = width // 2, [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    out = []
    for i in range(len(values)):
        a, b = max(0, i - half), min(len(values), i + half + 1)
        out.append((sums[b] - sums[a]) / (b - a))
    return out


def rolling_max(values: Sequence[float], width: int) -> list[float]:
    """The maximum of each value and its neighbours."""
    half = width // 2
    return [max(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
