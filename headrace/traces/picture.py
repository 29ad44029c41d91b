"""Draw a span of a run's timeline: which process generates, trains, waits or syncs, and when.

Each process has a row, and each slice is a box coloured by its kind. Concurrent samples are stacked in lanes.
A pause covers the samples that it stops. Grey means that the process was idle. Vertical lines are commits,
labelled with the version that begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.traces.reading import NothingRecorded, Trace, TraceEvent, read
from headrace.traces.recording import kind_of, process_order, track_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CROSSING = "generate, across a sync"
"""A sample with tokens of several versions."""
COLOURS = {
    "generate": "#5aa7e0",
    CROSSING: "#1f5f99",
    "validate": "#e8c33c",
    "update": "#2f9e62",
    "wait": "#f3ddc0",
    "sync pause": "#d9552b",
    "transfer": "#9a5fb5",
    "other": "#8a8f98",
}
"""Kinds in the order of the legend."""
_IDLE = "#eeeff1"
_OVER_LANES = ("sync pause", "transfer")
"""Kinds drawn over the samples of their process; the others are drawn behind."""

_LANE_LAYER = 2
_GAP_LANES = 16
"""With more lanes than this, no gaps are drawn between them."""
_OVER_ALPHA = 0.85
_WIDTH_IN, _DPI = 10.0, 100
_PLOT_PX = 870
"""Approximate width of the time axis in pixels."""
_MAX_LABELS = 24


@dataclass
class Lane:
    """The slices of one row, in lanes or outside them."""

    label: str
    lanes: dict[str, list[TraceEvent]] = field(default_factory=lambda: defaultdict(list))
    plain: list[TraceEvent] = field(default_factory=list)

    @property
    def height(self) -> float:
        return 1.7 if len(self.lanes) > 1 else 1.0


@dataclass(frozen=True)
class Box:
    """A rectangle in a row. `begin` and `end` are seconds; `bottom` and `height` are fractions of the row."""

    begin: float
    end: float
    bottom: float
    height: float
    kind: str
    layer: int
    alpha: float = 1.0


def draw(run_dir: Path, out: Path, seconds: tuple[float, float] | None, title: str) -> None:
    """Draw the run's timeline into `out`, or only the span `seconds`, counted from the first event.

    Needs matplotlib. Raises NothingRecorded if the span contains no slice.
    """
    found = read(run_dir)
    shown = rows(found)
    if not shown:
        raise NothingRecorded(f"{run_dir}: no slices recorded")
    begin, end = seconds or (0.0, (max(s.ended for s in found.starts) - found.began) / 1e9)
    placed = [(row, clipped(boxes(row, found.began), begin, end)) for row in shown]
    placed = [(row, found_boxes) for row, found_boxes in placed if found_boxes]
    if not placed:
        raise NothingRecorded(f"{run_dir}: no slices between {begin:g} s and {end:g} s")
    lines = [(at, text) for at, text in commits(found) if begin <= at <= end]
    _render(placed, lines, (begin, end), title, out)


# -- what is shown -------------------------------------------------------------------------------


def rows(found: Trace) -> list[Lane]:
    """One row per process, plus one for each of its tracks that is neither `main` nor a lane."""
    out: dict[tuple[str, str], Lane] = {}
    for start in found.starts:
        for event in start.events:
            if event.ph != "X":
                continue
            is_lane = "/" in event.track
            extra = "" if is_lane or event.track == "main" else event.track
            label = f"{start.process}\n{extra}" if extra else start.process
            row = out.setdefault((start.process, extra), Lane(label))
            (row.lanes[event.track] if is_lane else row.plain).append(event)
    return [out[key] for key in sorted(out, key=lambda k: (process_order(k[0]), k[1]))]


def boxes(row: Lane, zero: int) -> list[Box]:
    """The boxes of a row's slices. `zero`: start of the timeline, in nanoseconds."""
    out = []
    lanes = sorted(row.lanes, key=track_order)
    gap = 0.12 if len(lanes) <= _GAP_LANES else 0.0
    for number, lane in enumerate(lanes):
        for event in row.lanes[lane]:
            kind = kind_of(event.name)
            if kind == "generate" and event.args.get("partial"):
                kind = CROSSING
            out.append(_box(event, zero, kind, number / len(lanes), (1 - gap) / len(lanes), _LANE_LAYER))
    for event, depth in depths(row.plain):
        kind = kind_of(event.name)
        if lanes:
            over = kind in _OVER_LANES
            layer, alpha = (_LANE_LAYER + 1 + depth, _OVER_ALPHA) if over else (_LANE_LAYER - 1, 1.0)
            out.append(_box(event, zero, kind, 0.0, 1.0, layer, alpha))
        else:
            height = max(0.3, 1.0 - 0.3 * depth)
            out.append(_box(event, zero, kind, (1 - height) / 2, height, _LANE_LAYER + depth))
    return out


def _box(
    event: TraceEvent, zero: int, kind: str, bottom: float, height: float, layer: int, alpha: float = 1.0
) -> Box:
    return Box((event.ts - zero) / 1e9, (event.end - zero) / 1e9, bottom, height, kind, layer, alpha)


def depths(events: Iterable[TraceEvent]) -> list[tuple[TraceEvent, int]]:
    """Each slice with the number of slices around it."""
    out = []
    around: list[int] = []
    for event in sorted(events, key=lambda e: (e.ts, -e.dur)):
        while around and around[-1] <= event.ts:
            around.pop()
        out.append((event, len(around)))
        around.append(event.end)
    return out


def clipped(found: Iterable[Box], begin: float, end: float) -> list[Box]:
    """The boxes that overlap the span, clipped to it."""
    return [
        Box(max(b.begin, begin), min(b.end, end), b.bottom, b.height, b.kind, b.layer, b.alpha)
        for b in found
        if b.begin < end and b.end > begin
    ]


def commits(found: Trace) -> list[tuple[float, str]]:
    """(second, version as text) of every commit. The version comes from the enclosing round, if any."""
    events = [e for s in found.starts for e in s.events if e.ph == "X"]
    rounds = [e for e in events if e.name == "round"]
    out = []
    for commit in (e for e in events if e.name == "commit"):
        version = commit.args.get("version")
        for r in rounds:
            if r.ts <= commit.ts and commit.end <= r.end:
                version = r.args.get("version", version)
        out.append(((commit.end - found.began) / 1e9, "" if version is None else f"v{version}"))
    return sorted(out)


# -- drawing -------------------------------------------------------------------------------------


def _render(
    placed: Sequence[tuple[Lane, Sequence[Box]]],
    lines: Sequence[tuple[float, str]],
    span: tuple[float, float],
    title: str,
    out: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    total = sum(row.height for row, _ in placed)
    figure, axes = plt.subplots(figsize=(_WIDTH_IN, max(3.5, 1.3 + 0.42 * total)), layout="constrained")
    try:
        _rows(axes, placed, span)
        _lines(axes, lines, total)
        axes.set(xlim=span, xlabel="seconds", ylim=(total, 0))
        axes.set_title(title, loc="left", fontsize=12, pad=18 if lines else 6)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        _legend(axes, {b.kind for _, found in placed for b in found}, bool(lines))
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=_DPI)
    finally:
        plt.close(figure)


def _rows(axes: Axes, placed: Sequence[tuple[Lane, Sequence[Box]]], span: tuple[float, float]) -> None:
    """Draw the boxes row by row from the top, with the rows' names."""
    pixel = (span[1] - span[0]) / _PLOT_PX
    top, middles = 0.0, []
    for row, found in placed:
        low, tall = top + 0.08 * row.height, 0.84 * row.height
        axes.broken_barh([(span[0], span[1] - span[0])], (low, tall), color=_IDLE, linewidth=0, zorder=0)
        alike: dict[tuple[object, ...], list[Box]] = defaultdict(list)
        for box in found:
            alike[box.bottom, box.height, box.kind, box.layer, box.alpha].append(box)
        for group in alike.values():
            one = group[0]
            axes.broken_barh(
                [(b.begin, _width(b, pixel)) for b in group],
                (low + tall * one.bottom, tall * one.height),
                color=COLOURS[one.kind],
                linewidth=0,
                alpha=one.alpha,
                zorder=one.layer,
            )
        middles.append(top + row.height / 2)
        top += row.height
    axes.set_yticks(middles, [row.label for row, _ in placed])


def _width(box: Box, pixel: float) -> float:
    """Drawn width of a box: always visible, and with a gap before the next one if there is room."""
    width = box.end - box.begin
    return width - pixel if width > 4 * pixel and box.layer == _LANE_LAYER else max(width, 0.7 * pixel)


def _lines(axes: Axes, lines: Sequence[tuple[float, str]], bottom: float) -> None:
    """Draw the commits, and as many version labels as fit."""
    every = -(-len(lines) // _MAX_LABELS) or 1
    for number, (at, text) in enumerate(lines):
        axes.vlines(at, 0, bottom, color="#222222", linewidth=0.9, linestyle=(0, (4, 2)), zorder=9)
        if number % every == 0:
            axes.annotate(
                text, (at, 0), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=9
            )


def _legend(axes: Axes, kinds: set[str], with_lines: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Patch | Line2D] = [
        Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds
    ]
    entries.append(Patch(facecolor=_IDLE, edgecolor="#c8cad0", linewidth=0.6, label="idle"))
    if with_lines:
        entries.append(Line2D([], [], color="#222222", linewidth=0.9, linestyle=(0, (4, 2)), label="commit"))
    axes.figure.legend(
        handles=entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=9,
        handlelength=1.4, columnspacing=1.3, handletextpad=0.5,
    )  # fmt: skip
