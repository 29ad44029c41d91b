"""Record a run's timeline: every process appends its events to `RUN_DIR/trace/<process>-<pid>.jsonl`.

`headrace.traces.reading` reads the files, `headrace trace` merges them for Perfetto, and
`headrace.traces.picture` draws a span. A process without access to the directory sends its events to one
with access (`headrace.traces.relay`). Guarantees:

- Recording never disturbs the run. A full disk or a missing directory ends the recording with one warning;
  nothing raises. A recorder without a directory does nothing.
- A killed process loses at most the line that it was writing, and slices that were still open.
- Timestamps are nanoseconds since the epoch: the wall clock, read once per start, plus the monotonic clock
  since then. Processes of one machine line up, and setting the clock during the run does not break the
  timeline. Processes of several machines also record their offset from a common clock
  (`headrace.traces.clock`).

A file is JSON lines. `{"ph": "start", "process", "pid", "ts"}` opens each start of a process. Then follow the
events, one per line, each written when it ends. `ph` is X (slice, with `dur`), i (instant), C (counter, with
`value`), or `clock` (a measurement of the common clock).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.system import disk

if TYPE_CHECKING:
    from headrace.traces.clock import ClockReading

log = logging.getLogger("headrace.trace")

KINDS = {
    "generate": ("sample",),
    "validate": ("validate",),
    "update": ("adv", "old_log_prob", "ref", "values", "update_actor", "update_critic"),
    "wait": ("gen_wait", "wait_prev_gen", "let_finish"),
    "sync pause": ("param_sync", "round", "pause", "paused", "commit"),
    "transfer": ("transfer", "load"),
}
"""Kinds of the services' slices: colours in the picture, categories in the merged file."""
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
_PROCESSES = ("trainer", "rollouter", "coordinator", "queue")

DIRECTORY = "trace"
MAX_EVENTS = 500_000
_OPEN = sys.maxsize
"""Stands for the end of a lane's interval that is still open."""


class TraceSink(Protocol):
    """Takes a recorder's lines instead of a file."""

    def write(self, line: bytes) -> None:
        """Take the whole line or drop it, without waiting."""


class Recorder:
    """Records the events of one process. Any thread may record; a forked child records nothing.

    Slices on one track must nest or follow each other. Use `Lanes` for slices that overlap.
    """

    def __init__(self, where: Path | TraceSink | None, process: str, *, max_events: int = MAX_EVENTS) -> None:
        """`where`: the run's directory, or the sink of the lines. `process`: the timeline's row, stable over
        restarts and unique among concurrent processes, e.g. `trainer-0`. `max_events` bounds the file.
        """
        self.process = process
        self._left = max_events
        self._max_events = max_events
        self._pid = os.getpid()
        self.offset_ns = _wall_minus_monotonic()
        # Reentrant: a signal handler may record while its own thread is recording.
        self._lock = threading.RLock()
        self._file = -1
        self._sink: TraceSink | None = None
        if isinstance(where, Path):
            self._path = where / DIRECTORY / f"{process}-{self._pid}.jsonl"
            self._open()
        elif where is not None:
            self._sink = where
            self._write(self._opening())

    @property
    def enabled(self) -> bool:
        """Whether events are still recorded. Callers may check it before computing costly arguments."""
        return self._file >= 0 or self._sink is not None

    def slice(
        self, name: str, track: str = "main", **args: object
    ) -> AbstractContextManager[dict[str, object]]:
        """Record the body as a slice. The context manager yields the arguments, to which the body may add.

        An exception that leaves the body is recorded as `error`. Tasks that interleave in one thread need
        `Lanes.slice`.
        """
        if not self.enabled:
            return nullcontext(args)
        return _timed(args, lambda start, end: self._complete(name, start, end, track, args))

    def complete(self, name: str, start_ns: int, end_ns: int, track: str = "main", **args: object) -> None:
        """Record a slice that was measured elsewhere, in nanoseconds of `time.monotonic_ns()`."""
        if self.enabled:
            self._complete(name, start_ns, end_ns, track, args)

    def _complete(
        self, name: str, start_ns: int, end_ns: int, track: str, args: Mapping[str, object]
    ) -> None:
        self._add("X", name, track, start_ns, {"dur": max(0, end_ns - start_ns)}, args)

    def instant(self, name: str, track: str = "main", **args: object) -> None:
        """Record something that happens now."""
        if self.enabled:
            self._add("i", name, track, time.monotonic_ns(), {}, args)

    def counter(self, name: str, value: float) -> None:
        """Record a quantity's value from now on. Values that are not finite are dropped."""
        if self.enabled and math.isfinite(value):
            self._add("C", name, "", time.monotonic_ns(), {"value": value}, {})

    def clock(self, reading: ClockReading) -> None:
        """Record the offset of the common clock from this one."""
        line = {"ph": "clock", "ts": reading.ts, "ahead": reading.ahead, "within": reading.within}
        self._add_line(line)

    def close(self) -> None:
        """Stop recording. Not needed before the process ends, because nothing is buffered here."""
        with self._lock:
            self._sink = None
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    # -- writing ---------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if os.fstat(self._file).st_size:
                self._write(b"\n")  # an earlier process with this pid may have left a partial line
            self._write(self._opening())
        except OSError as error:
            self._give_up(error)

    def _opening(self) -> bytes:
        began = time.monotonic_ns() + self.offset_ns
        return _line({"ph": "start", "process": self.process, "pid": self._pid, "ts": began})

    def _add(
        self,
        ph: str,
        name: str,
        track: str,
        monotonic_ns: int,
        fields: Mapping[str, object],
        args: Mapping[str, object],
    ) -> None:
        event: dict[str, object] = {"ph": ph, "name": name, "ts": monotonic_ns + self.offset_ns, **fields}
        if track:
            event["track"] = track
        if args:
            event["args"] = args
        self._add_line(event)

    def _add_line(self, event: Mapping[str, object]) -> None:
        if os.getpid() != self._pid:  # before the lock: in a forked child another thread may hold it for ever
            return
        line = _line(event)
        with self._lock:
            if not self.enabled:
                return
            try:
                if self._left <= 0:
                    self._truncate()
                    return
                self._left -= 1
                self._write(line)
            except OSError as error:
                self._give_up(error)

    def _write(self, line: bytes) -> None:
        """Write the whole line, or raise OSError; a disk that fills up may take a part first."""
        if self._sink is not None:
            self._sink.write(line)
            return
        while line:
            line = line[os.write(self._file, line) :]

    def _truncate(self) -> None:
        now = time.monotonic_ns() + self.offset_ns
        args = {"max_events": self._max_events}
        self._write(_line({"ph": "i", "name": "truncated", "ts": now, "track": "main", "args": args}))
        self.close()

    def _give_up(self, error: OSError) -> None:
        try:
            self.close()
        except OSError:
            self._file = -1
        log.warning(
            "the trace ends here",
            extra={"path": str(self._path), "error": disk.full(error, self._path) or str(error)},
        )


class Lanes:
    """Tracks `<group>/0`, `<group>/1`, ... for slices that overlap, e.g. concurrent samples.

    Each slice gets the lowest lane in which no other slice is open or ended after its start. So slices of one
    lane never overlap, and viewers stack concurrent ones.
    """

    def __init__(self, recorder: Recorder, group: str) -> None:
        self._recorder = recorder
        self._group = group
        self._free_from: list[int] = []
        self._lock = threading.RLock()

    def slice(self, name: str, **args: object) -> AbstractContextManager[dict[str, object]]:
        """Like `Recorder.slice`, but it may span an `await`."""
        return self._slice(name, args) if self._recorder.enabled else nullcontext(args)

    @contextmanager
    def _slice(self, name: str, args: dict[str, object]) -> Iterator[dict[str, object]]:
        lane = self.take(time.monotonic_ns(), _OPEN)

        def done(start_ns: int, end_ns: int) -> None:
            self._recorder._complete(name, start_ns, end_ns, self._track(lane), args)
            with self._lock:
                self._free_from[lane] = end_ns

        with _timed(args, done):
            yield args

    def complete(self, name: str, start_ns: int, end_ns: int, **args: object) -> None:
        """Like `Recorder.complete`."""
        if self._recorder.enabled:
            track = self._track(self.take(start_ns, end_ns))
            self._recorder._complete(name, start_ns, end_ns, track, args)

    def take(self, start_ns: int, end_ns: int) -> int:
        """Reserve the lowest lane that is free at `start_ns`, until `end_ns`."""
        with self._lock:
            free = (lane for lane, ns in enumerate(self._free_from) if ns <= start_ns)
            lane = next(free, len(self._free_from))
            self._free_from[lane : lane + 1] = [max(start_ns, end_ns)]
            return lane

    def _track(self, lane: int) -> str:
        return f"{self._group}/{lane}"


@contextmanager
def _timed(args: dict[str, object], done: Callable[[int, int], None]) -> Iterator[dict[str, object]]:
    """Call `done` with the begin and end of the body. An exception that leaves it goes into the arguments."""
    began = time.monotonic_ns()
    try:
        yield args
    except BaseException as error:  # re-raised; cancellation is recorded too
        args["error"] = type(error).__name__
        raise
    finally:
        done(began, time.monotonic_ns())


def _wall_minus_monotonic() -> int:
    """Nanoseconds between the two clocks. Uses the fastest of several readings, because on a busy machine
    milliseconds may pass between two calls.
    """
    readings = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def _line(event: Mapping[str, object]) -> bytes:
    """Encode the event as one line. Arguments that JSON cannot represent become text."""
    try:
        text = json.dumps(event, allow_nan=False, default=str, separators=(",", ":"))
    except (TypeError, ValueError):  # not finite, circular, or a key that is no text
        args = event.get("args")
        shown = {k: str(v) for k, v in args.items()} if isinstance(args, Mapping) else {}
        text = json.dumps({**event, "args": shown}, default=str, separators=(",", ":"))
    return text.encode() + b"\n"


def kind_of(name: str) -> str:
    """The kind of a slice; `other` if it is not in KINDS."""
    return _KIND_OF.get(name, "other")


def process_order(name: str) -> tuple[object, ...]:
    """Sort key of processes, the first one on top."""
    rank = next((i for i, kind in enumerate(_PROCESSES) if kind in name), len(_PROCESSES))
    return (rank, *track_order(name))


def track_order(name: str) -> tuple[object, ...]:
    """Sort key of tracks: `main` first, then by name, numbers by value."""
    parts = (part for part in re.split(r"([0-9]+)", name) if part)
    return (name != "main", *((not p.isdecimal(), int(p) if p.isdecimal() else p) for p in parts))
