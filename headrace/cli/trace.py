"""`headrace trace`: a run's timeline in one file for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from headrace.cli import options
from headrace.cli.status import no_run
from headrace.records.layout import find_run
from headrace.traces.reading import NothingRecorded, ProcessTrace, Trace, TraceEvent, read
from headrace.traces.recording import kind_of, process_order, track_order

EXIT_USAGE = 2

STDOUT = Path("-")
_SHOWN_PROBLEMS = 5

ChromeEvent = dict[str, Any]
"""One object of `traceEvents`."""


DESCRIPTION = (
    "Merge the recordings of a run's processes (`trace.enable: true`) into one timeline for "
    "https://ui.perfetto.dev. Works during the run, too."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="compressed if the name ends in .gz; - for standard output (default: RUN/trace.json)",
    )


def main(args: argparse.Namespace) -> int:
    return trace(args.run, args.runs_dir, args.out)


def trace(name: str, runs_dir: Path, out: Path | None) -> int:
    """The command; returns the exit code. Raises OSError when a file cannot be read or written."""
    layout = find_run(name, runs_dir)
    if layout is None:
        print(no_run(name, runs_dir), file=sys.stderr)
        return EXIT_USAGE
    try:
        found = read(layout.root)
    except NothingRecorded as error:
        print(f"headrace: {error}", file=sys.stderr)
        return EXIT_USAGE
    target = out or layout.root / "trace.json"
    to_stdout = target == STDOUT
    if target.is_dir():
        print(f"headrace: {target}: is a directory; give a file with --out", file=sys.stderr)
        return EXIT_USAGE
    events = merge(found)
    if to_stdout:
        write(events, sys.stdout)
    else:
        with gzip.open(target, "wt") if target.suffix == ".gz" else open(target, "w") as file:
            write(events, file)
    for line in remarks(found, validate(events)):
        print(f"headrace: {line}", file=sys.stderr)
    where = "the file" if to_stdout else str(target)
    print(summary(found, where), file=sys.stderr if to_stdout else sys.stdout)
    return 0


def summary(found: Trace, target: str) -> str:
    """One line about the written file."""
    events = sum(len(s.events) for s in found.starts)
    processes = len({s.process for s in found.starts})
    seconds = (max(s.ended for s in found.starts) - found.began) / 1e9
    within = found.clocks_within
    clocks = "" if within is None else f", their clocks aligned to {within / 1e6:.1f} ms,"
    return (
        f"{events} events of {processes} process{'es' if processes > 1 else ''} over {seconds:.1f} s"
        f"{clocks} in {target}; open it at https://ui.perfetto.dev"
    )


def remarks(found: Trace, problems: Sequence[str]) -> list[str]:
    """Gaps and anomalies in the file, one sentence each."""
    out = []
    if found.torn:
        what = "1 line was" if found.torn == 1 else f"{found.torn} lines were"
        out.append(f"{what} cut short and left out: a process was killed while it wrote, or is writing")
    if found.holes:
        what = "1 stretch" if found.holes == 1 else f"{found.holes} stretches"
        out.append(
            f"{what} of events never came: Redis had room for no more until the trainer's pod collected them"
        )
    for start in found.starts:
        dropped = sum(int(e.args.get("events", 0)) for e in start.events if e.name == "dropped")
        if dropped:
            out.append(
                f"{start.process} (process {start.pid}) could not send {dropped} events to Redis in time"
            )
        if start.events and start.events[-1].name == "truncated":
            limit = start.events[-1].args.get("max_events", len(start.events) - 1)
            out.append(f"{start.process} (process {start.pid}) stopped recording after {limit} events")
    out += problems[:_SHOWN_PROBLEMS]
    if len(problems) > _SHOWN_PROBLEMS:
        out.append(f"{len(problems) - _SHOWN_PROBLEMS} more problems of this kind")
    return out


def write(events: Iterable[ChromeEvent], file: IO[str]) -> None:
    """Write the merged file, one event per line."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for number, event in enumerate(events):
        file.write(",\n" if number else "\n")
        file.write(json.dumps(event))
    file.write("\n]}\n")


# -- merging -------------------------------------------------------------------------------------


def merge(found: Trace) -> list[ChromeEvent]:
    """All starts as Chrome trace events: metadata first, then by time, parents before their children.

    The starts of one process share a row. A start that begins before the last one ended (two processes with
    one name) gets its own row. `pid` is the row's number, because real process ids may repeat.
    """
    zero = found.began
    metadata: list[ChromeEvent] = []
    events: list[ChromeEvent] = []
    for pid, (name, starts) in enumerate(_rows(found.starts), 1):
        metadata += _named("process", name, pid, 0, pid)
        numbers: dict[str, int] = {}
        for track in sorted(
            {"main"} | {e.track for s in starts for e in s.events if e.track}, key=track_order
        ):
            tid = numbers[track] = len(numbers) + 1
            metadata += _named("thread", track, pid, tid, tid)
        for start in starts:
            begin = TraceEvent("i", "start", "main", start.ts, args={"pid": start.pid})
            events += [_chrome(e, pid, numbers, zero) for e in [begin, *start.events]]
    return metadata + sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0.0)))


def _rows(starts: Sequence[ProcessTrace]) -> list[tuple[str, list[ProcessTrace]]]:
    """(name, starts) of each row, from the top."""
    rows: list[list[ProcessTrace]] = []
    for start in sorted(starts, key=lambda s: s.began):
        same = (row for row in rows if row[-1].process == start.process and row[-1].ended <= start.began)
        row = next(same, None)
        if row is None:
            rows.append([start])
        else:
            row.append(start)
    rows.sort(key=lambda row: (process_order(row[0].process), row[0].began))
    counts: dict[str, int] = defaultdict(int)
    named = []
    for row in rows:
        process = row[0].process
        counts[process] += 1
        again = f" (process {row[0].pid})" if counts[process] > 1 else ""
        named.append((process + again, row))
    return named


def _named(what: str, name: str, pid: int, tid: int, index: int) -> list[ChromeEvent]:
    """Metadata events: name and position of a process or thread."""
    where = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {"name": f"{what}_name", **where, "args": {"name": name}},
        {"name": f"{what}_sort_index", **where, "args": {"sort_index": index}},
    ]


def _chrome(event: TraceEvent, pid: int, numbers: Mapping[str, int], zero: int) -> ChromeEvent:
    """One event. Times are microseconds with three decimals, so no nanosecond is lost."""
    out: ChromeEvent = {"ph": event.ph, "name": event.name, "pid": pid, "ts": (event.ts - zero) / 1000}
    out["tid"] = numbers[event.track] if event.track else 0
    match event.ph:
        case "X":
            out |= {"cat": kind_of(event.name), "dur": event.dur / 1000, "args": event.args}
        case "i":
            out |= {"s": "t", "args": event.args}
        case "C":
            out["args"] = {"value": event.value}
    return out


# -- checking ------------------------------------------------------------------------------------

_KEYS = {
    "X": ("name", "pid", "tid", "ts", "dur"),
    "i": ("name", "pid", "tid", "ts", "s"),
    "C": ("name", "pid", "ts", "args"),
    "M": ("name", "pid", "tid", "args"),
}


def validate(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Problems of Chrome trace events, one sentence each.

    Finds missing keys, negative times, processes and tracks without a name, and slices of one track that
    overlap without nesting (viewers drop those).
    """
    problems: list[str] = []
    named: set[tuple[int, int | None]] = set()
    names: dict[tuple[int, int | None], str] = {}
    tracks: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    sound = []
    for event in events:
        wrong = _wrong(event)
        problems += wrong
        if not wrong:
            sound.append(event)
    for event in sound:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            where = (event["pid"], None if event["name"] == "process_name" else event["tid"])
            named.add(where)
            names[where] = event["args"]["name"]
        elif event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    used = {(e["pid"], None) for e in sound} | {(e["pid"], e["tid"]) for e in sound if e["ph"] in "Xi"}
    problems += [f"process {pid}, track {tid}: has no name" for pid, tid in sorted(used - named, key=str)]
    for (pid, tid), slices in tracks.items():
        where_text = f"{names.get((pid, None), pid)}, track {names.get((pid, tid), tid)}"
        problems += [f"{where_text}: {text}" for text in overlaps(slices)]
    return problems


def _wrong(event: Mapping[str, Any]) -> list[str]:
    """Problems of a single event."""
    keys = _KEYS.get(event.get("ph", ""))
    if keys is None:
        return [f"unknown phase {event.get('ph')!r}: {event}"]
    missing = [key for key in keys if key not in event]
    if missing:
        return [f"{', '.join(missing)} missing: {event}"]
    odd = [key for key in ("ts", "dur") if key in event and not _is_time(event[key])]
    return [f"{key} {event[key]!r} is no time: {event}" for key in odd]


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")


def overlaps(slices: Iterable[Mapping[str, Any]]) -> list[str]:
    """Problems of one track: slices that begin within another slice and end after it."""
    problems = []
    around: list[tuple[int, str]] = []  # (end, name) of the open slices
    for event in sorted(slices, key=lambda e: (_ns(e["ts"]), -_ns(e["dur"]))):
        begin, end = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
        while around and around[-1][0] <= begin:
            around.pop()
        if around and end > around[-1][0]:
            problems.append(
                f"{event['name']} from {begin / 1e9:.6f} s to {end / 1e9:.6f} s overlaps "
                f"{around[-1][1]}, which ends at {around[-1][0] / 1e9:.6f} s"
            )
        around.append((end, event["name"]))
    return problems


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
