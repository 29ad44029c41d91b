"""Read a run's recorded events, for `headrace trace` and the pictures.

If a start has measured its clock's offset from the Redis server's (`headrace.traces.clock`), its times are
converted to the server's clock, so that processes of several nodes line up.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.traces import clock as trace_clock
from headrace.traces.recording import DIRECTORY


@dataclass(slots=True)
class TraceEvent:
    """One recorded event. Times are nanoseconds, `ts` since the epoch. Only counters have a `value`."""

    ph: str
    name: str
    track: str
    ts: int
    dur: int = 0
    value: float = 0.0
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.ts + self.dur


@dataclass
class ProcessTrace:
    """The events that one start of a process recorded."""

    process: str
    pid: int
    ts: int
    events: list[TraceEvent] = field(default_factory=list)
    clock: list[trace_clock.ClockReading] = field(default_factory=list)
    """In order of time; empty if all processes share one clock."""

    def align(self) -> None:
        """Convert all times to the common clock."""
        self.ts = trace_clock.aligned(self.ts, self.clock)
        for event in self.events:
            end = trace_clock.aligned(event.end, self.clock)
            event.ts = trace_clock.aligned(event.ts, self.clock)
            event.dur = end - event.ts

    @property
    def began(self) -> int:
        """Time of the first event: slices measured elsewhere may have begun before the recorder."""
        return min([self.ts, *(e.ts for e in self.events)])

    @property
    def ended(self) -> int:
        return max([self.ts, *(e.end for e in self.events)])


@dataclass
class Trace:
    """A run's timeline: every start of every process."""

    starts: list[ProcessTrace]
    """In order of their beginnings."""
    torn: int
    """Number of unreadable lines."""
    holes: int = 0
    """Number of gaps where lines were lost before they reached the file."""

    @property
    def began(self) -> int:
        """Time of the first event: zero of the merged timeline."""
        return min(s.began for s in self.starts)

    @property
    def clocks_within(self) -> int | None:
        """The largest error of the clock alignment in nanoseconds; None without any measurement."""
        return max((r.within for s in self.starts for r in s.clock), default=None)


class NothingRecorded(ValueError):
    """The run has no events."""


def read(run_dir: Path) -> Trace:
    """Read what a run has recorded so far. Raises NothingRecorded; OSError for an unreadable file."""
    starts: list[ProcessTrace] = []
    torn = holes = 0
    for path in sorted((run_dir / DIRECTORY).glob("*.jsonl")):
        found, bad, missing = _read_file(path)
        starts += found
        torn += bad
        holes += missing
    if not any(s.events for s in starts):
        raise NothingRecorded(
            f"{run_dir / DIRECTORY}: nothing recorded; `trace.enable: true` in the configuration records it"
        )
    for start in starts:
        start.align()
    return Trace(sorted(starts, key=lambda s: s.ts), torn, holes)


def _read_file(path: Path) -> tuple[list[ProcessTrace], int, int]:
    """The starts in one file, and the numbers of its unreadable lines and of its holes."""
    starts: list[ProcessTrace] = []
    torn = holes = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.lstrip("\0").strip()
            holes += line.startswith("\0")
            if not text:
                continue
            try:
                row = json.loads(text)
                if row["ph"] == "start":
                    starts.append(ProcessTrace(str(row["process"]), int(row["pid"]), int(row["ts"])))
                    continue
                if row["ph"] == "clock":
                    reading = trace_clock.ClockReading(int(row["ts"]), int(row["ahead"]), int(row["within"]))
                    if starts and (not starts[-1].clock or starts[-1].clock[-1].ts < reading.ts):
                        starts[-1].clock.append(reading)
                    continue
                event = _event(row)
            except (ValueError, TypeError, KeyError):
                torn += 1
                continue
            if not starts:  # the opening line was lost
                process, _, pid = re.sub(r"\.[0-9a-f]{8}$", "", path.stem).rpartition("-")
                starts.append(ProcessTrace(process or path.stem, int(pid) if pid.isdigit() else 0, event.ts))
            starts[-1].events.append(event)
    return starts, torn, holes


def _event(row: dict[str, Any]) -> TraceEvent:
    """Parse an event. Raises KeyError, TypeError or ValueError for a line that is not one."""
    ph, name, ts = str(row["ph"]), str(row["name"]), int(row["ts"])
    match ph:
        case "X":
            return TraceEvent(
                ph, name, str(row["track"]), ts, int(row["dur"]), 0.0, dict(row.get("args", {}))
            )
        case "i":
            return TraceEvent(ph, name, str(row["track"]), ts, 0, 0.0, dict(row.get("args", {})))
        case "C":
            return TraceEvent(ph, name, "", ts, value=float(row["value"]))
    raise ValueError(f"unknown kind of event: {ph}")
