"""Progress display of a running run: a live panel on a terminal, plain lines elsewhere.

Everything shown comes from the run's own records: `metrics.jsonl`, `eval.jsonl` and the ledger's statistics.
The display keeps no counts of its own. A thread reads the ledger, so an unresponsive server never delays
Ctrl-C.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import redis
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.ledger.marks import Marks
from headrace.ledger.replies import Stats
from headrace.metrics import row_keys
from headrace.records.evaluations import eval_rows
from headrace.records.summary import duration, percent
from headrace.system import terminal

_LEDGER_EVERY_S = 1.0
_PLAIN_EVERY_S = 5.0
_ETA_STEPS = 20


class StatsPoll:
    """Reads the ledger's statistics every second in a daemon thread. `stats` is None until the first read."""

    def __init__(self, url: str, run: str) -> None:
        self.stats: Stats | None = None
        self._stopped = threading.Event()
        self._ledger = SyncLedger(connect(url, timeout_s=2.0), run, retry_s=0.0)
        self._thread = threading.Thread(target=self._read, name="ledger-watch", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stopped.is_set():
            # The server is starting or restarting: the last reading stays on the screen.
            with contextlib.suppress(LedgerError, redis.RedisError, OSError):
                self.stats = self._ledger.run(ops.stats())
            self._stopped.wait(_LEDGER_EVERY_S)

    @property
    def seen(self) -> Marks:
        """The latest position seen in the ledger."""
        return self._ledger.seen

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=3.0)
        self._ledger.close()


@dataclass
class RunProgress:
    """The displayed state of the run."""

    total_steps: int
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    scores: list[tuple[int, str, float]] = field(default_factory=list)
    """(policy version, data source, held-out reward), oldest first."""
    stats: Stats | None = None
    services: dict[str, str] = field(default_factory=dict)
    """State of each service."""
    arrivals: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_ETA_STEPS))

    def add_rows(self, rows: list[dict[str, Any]], now: float) -> None:
        """Take in new rows of `metrics.jsonl`; `now` is monotonic seconds."""
        for row in rows:
            self.values.update(row)
            step = row.get("step")
            if isinstance(step, int):
                self.step = step
                if self.arrivals and self.arrivals[-1][0] >= step:  # rolled back
                    self.arrivals.clear()
                self.arrivals.append((step, now))

    def read_scores(self, path: Path) -> None:
        self.scores = [
            (row["version"], row["data_source"], float(row["reward"]))
            for row in eval_rows(path)
            if isinstance(row["reward"], int | float)
        ]

    @property
    def version(self) -> int | None:
        """Policy version from the ledger, or else from the last row."""
        if self.stats is not None and self.stats.version >= 0:
            return self.stats.version
        value = self.values.get(row_keys.FULLY_ASYNC_COUNT_CURRENT_PARAM_VERSION)
        return int(value) if isinstance(value, int | float) else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, at the pace of recent steps."""
        if len(self.arrivals) < 2:
            return None
        (first, began), (last, ended) = self.arrivals[0], self.arrivals[-1]
        if last <= first or ended <= began:
            return None
        return max(0, self.total_steps - last) * (ended - began) / (last - first)

    def number(self, key: str, digits: int = 3) -> str:
        value = self.values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return "-"
        return f"{value:.{digits}f}" if isinstance(value, float) else str(value)

    def cells(self) -> list[tuple[str, str]]:
        """(label, value) of every displayed cell."""
        counts = self.stats.counts if self.stats else None
        version = self.version
        return [
            # Samples requeued by hand are trained in extra short updates, which the plan does not count.
            ("step", f"{self.step}/{max(self.step, self.total_steps)}"),
            ("reward", self.number(row_keys.REWARD_MEAN)),
            ("version", "-" if version is None else str(version)),
            ("trainer idle", _share(self.values.get(row_keys.TRAINER_IDLE_RATIO))),
            ("rollouter idle", _share(self.values.get(row_keys.ROLLOUTER_IDLE_RATIO))),
            ("queue", str(counts["queued"]) if counts else self.number(row_keys.QUEUE_DEPTH, 0)),
            ("in flight", str(counts["in_flight"]) if counts else self.number(row_keys.QUEUE_IN_FLIGHT, 0)),
            ("held-out", self._held_out()),
            ("left", "-" if self.eta_s is None else duration(self.eta_s)),
        ]

    def _held_out(self) -> str:
        if not self.scores:
            return "-"
        shown = self.scores[-4:]
        text = ", ".join(f"{reward:.3f} (v{version})" for version, _, reward in shown)
        return text if len(shown) == len(self.scores) else f"{self.scores[0][2]:.3f} (v0) … {text}"


def _share(value: Any) -> str:
    return "-" if not isinstance(value, int | float) else percent(value)


class Display(Protocol):
    """Where the run is shown."""

    def phase(self, text: str) -> None:
        """Show what the run is waiting for; replaces the previous phase."""

    def note(self, text: str) -> None:
        """Show an event; it stays on the screen."""

    def update(self, progress: RunProgress) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    """One line per phase, per note and per sync (or every few seconds), for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._phase = ""
        self._shown: tuple[int, int | None] = (0, None)
        self._next = 0.0

    def phase(self, text: str) -> None:
        if text and text != self._phase:
            self.note(text)
        self._phase = text

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a pipe's reader may be gone; the run continues
            print(text, file=self._out, flush=True)

    def update(self, progress: RunProgress) -> None:
        state = (progress.step, progress.version)
        if not progress.step or state[0] == self._shown[0]:
            return
        if state[1] == self._shown[1] and time.monotonic() < self._next:
            return
        self._shown, self._next = state, time.monotonic() + _PLAIN_EVERY_S
        self.note("  ".join(f"{label} {value}" for label, value in progress.cells() if value != "-"))

    def close(self) -> None:
        pass


class LivePanel:
    """A panel that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._phase = ""
        self._progress: RunProgress | None = None
        # No auto-refresh: rich's thread must not run while a service is being forked.
        self._live = Live(self._panel(), console=console, auto_refresh=False, transient=True)
        self._live.start()
        terminal.guard()  # Live has replaced stdout and stderr, and interprets control sequences

    def phase(self, text: str) -> None:
        self._phase = text
        self._draw()

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(Text(terminal.safe(text)))

    def update(self, progress: RunProgress) -> None:
        self._progress = progress
        self._draw()

    def _draw(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be closed; the stop stays graceful
            self._live.update(self._panel(), refresh=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def _panel(self) -> Panel:
        parts: list[Any] = []
        if self._phase:
            parts.append(Text(terminal.safe(self._phase), style="bold"))
        if self._progress is not None:
            services = ", ".join(f"{n} {s}" for n, s in self._progress.services.items() if s != "ready")
            if services:
                parts.append(Text(terminal.safe(services), style="dim"))
            table = Table.grid(padding=(0, 2))
            for label, value in self._progress.cells():
                table.add_row(Text(label, style="dim"), Text(terminal.safe(value)))
            parts.append(table)
        return Panel(Group(*parts), title=Text(terminal.safe(self._title)), title_align="left")


def make_display(out: TextIO, title: str) -> Display:
    """A panel on a terminal, lines elsewhere."""
    console = Console(file=terminal.raw(out))
    if console.is_terminal and not console.is_dumb_terminal:
        return LivePanel(console, title)
    return PlainLines(out)
