"""Relay events of processes that cannot write to the run's directory: only the trainer's pods mount it.

    rollouter, coordinator          Redis                                the trainer's launcher
    Recorder ──► Relay ──► stream `headrace:{run}:trace` ──► Collector ──► RUN_DIR/trace/

Guarantees:

- Recording never blocks. Events go into a buffer of `BUFFER_BYTES`, which a separate thread sends every
  second. When it is full, events are dropped and counted, and the count is recorded as an event.
- The stream holds at most `STREAM_BYTES`, even if nothing collects it: the oldest chunk is dropped first.
- A chunk carries its offset in its process's file and is written there. A chunk that is sent or collected
  twice, by any number of collectors, is stored once. A lost chunk leaves a hole, which is counted.
- A process that dies loses what it recorded since it last sent, about a second's worth.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from headrace.config.redis_memory import TRACE_BYTES
from headrace.connections.redis_client import LOGIN_REFUSED, connect
from headrace.ledger import keys
from headrace.traces import clock
from headrace.traces.recording import DIRECTORY, Recorder

log = logging.getLogger("headrace.trace")

CHUNK_BYTES = 16 * 1024
STREAM_BYTES = TRACE_BYTES
MAX_CHUNKS = STREAM_BYTES // CHUNK_BYTES
BUFFER_BYTES = 4 * 1024 * 1024
PERIOD_S = 1.0
END_S = 3.0
"""Longest time that an ending process spends on its last send or collection."""
_CALL_S = 2.0
_AT_ONCE = 64
_LARGEST_FILE = 4 * 2**30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.jsonl")


def stream_key(run: str) -> str:
    return keys.prefix(run) + "trace"


class Relay:
    """Takes a recorder's lines and sends them in chunks of whole lines. Any thread may write."""

    def __init__(self, client: redis.Redis, run: str, process: str) -> None:
        self._client = client
        self._key = stream_key(run)
        # Containers share low process ids (often 1), so the file's name needs a random part.
        self._name = f"{process}-{os.getpid()}.{uuid.uuid4().hex[:8]}.jsonl"
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._sent = 0  # bytes of the file
        self._chunk = b""  # being sent; kept until the server has it
        self._lock = threading.RLock()  # a signal handler may record while its own thread is recording

    def write(self, line: bytes) -> None:
        """Buffer a line, or drop it if the buffer is full. Never blocks."""
        with self._lock:
            if self._bytes + len(line) > BUFFER_BYTES:
                self._dropped += 1
                return
            self._bytes += len(line)
            self._lines.append(line)

    def take_dropped(self) -> int:
        """Number of lines dropped since the last call; 0 while the buffer is still more than half full."""
        with self._lock:
            if self._bytes > BUFFER_BYTES // 2:
                return 0
            count, self._dropped = self._dropped, 0
            return count

    def send(self, spare: bool = False) -> None:
        """Send everything buffered. Raises redis.RedisError; what the server did not take stays buffered.

        `spare`: while nothing is being collected, send only full chunks, because the stream is bounded by the
        number of chunks.
        """
        spare = spare and int(self._client.xlen(self._key)) > MAX_CHUNKS // 2
        while self._chunk or (chunk := self._next(CHUNK_BYTES if spare else 1)):
            self._chunk = self._chunk or chunk
            fields: dict[Any, Any] = {"name": self._name, "at": self._sent, "lines": self._chunk}
            self._client.xadd(self._key, fields, maxlen=MAX_CHUNKS, approximate=False)
            self._sent += len(self._chunk)
            self._chunk = b""

    def _next(self, least: int) -> bytes:
        with self._lock:
            if self._bytes < least:
                return b""
            taken = [self._lines.popleft()] if self._lines else []  # even if longer than a chunk
            size = sum(map(len, taken))
            while self._lines and size + len(self._lines[0]) <= CHUNK_BYTES:
                taken.append(self._lines.popleft())
                size += len(taken[-1])
            self._bytes -= size
        return b"".join(taken)


def relayed(url: str, run: str, process: str, max_events: int) -> Recorder:
    """A recorder that sends its events through Redis to the collector of `run`."""
    client = connect(url, _CALL_S)
    relay = Relay(client, run, process)
    recorder = Recorder(relay, process, max_events=max_events)

    def turn() -> None:
        if dropped := relay.take_dropped():
            recorder.instant("dropped", events=dropped)
        relay.send(spare=recorder.enabled)

    _follow(recorder, client, turn)
    return recorder


def with_clock(recorder: Recorder, url: str) -> None:
    """Record measurements of the server's clock in `recorder`, whatever its destination."""
    _follow(recorder, connect(url, _CALL_S), lambda: None)


def _follow(recorder: Recorder, client: redis.Redis, turn: Callable[[], None]) -> None:
    due = 0.0

    def work() -> bool:
        nonlocal due
        enabled = recorder.enabled  # read before the last turn, which sends the rest
        if enabled and time.monotonic() >= due:
            recorder.clock(clock.ask(client, recorder.offset_ns))
            due = time.monotonic() + clock.EVERY_S
        turn()
        return enabled

    end = _in_background("trace", work)

    def last() -> None:
        if os.getpid() == owner:
            end()

    owner = os.getpid()
    atexit.register(last)


class Collector:
    """Writes a run's chunks into its directory."""

    def __init__(self, client: redis.Redis, run: str, run_dir: Path) -> None:
        self._client = client
        self._key = stream_key(run)
        self._directory = run_dir / DIRECTORY

    def collect(self) -> int:
        """Collect all available chunks; returns their number.

        A chunk is deleted from the server after it is written. Raises redis.RedisError; OSError for the
        directory.
        """
        count = 0
        while found := self._next():
            self._directory.mkdir(parents=True, exist_ok=True)
            for _, fields in found:
                self._write(fields)
            self._client.xdel(self._key, *(number for number, _ in found))
            count += len(found)
        return count

    def _next(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer: Any = self._client.xrange(self._key, count=_AT_ONCE)
        return list(answer)

    def _write(self, fields: dict[bytes, bytes]) -> None:
        try:
            name, at, lines = fields[b"name"].decode(), int(fields[b"at"]), fields[b"lines"]
        except (KeyError, ValueError):
            name, at, lines = "", 0, b""
        # Untrusted input from the network that becomes a path and an offset.
        if not _NAME.fullmatch(name) or not 0 <= at <= _LARGEST_FILE:
            log.warning("a part of the trace is not one of ours and is left out", extra={"part": name})
            return
        file = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            while lines:
                written = os.pwrite(file, lines, at)
                at, lines = at + written, lines[written:]
        finally:
            os.close(file)


@contextmanager
def collecting(url: str, run: str, run_dir: Path) -> Iterator[None]:
    """Collect while the body runs, and once more at its end. Failures never reach the body."""
    collector = Collector(connect(url, _CALL_S), run, run_dir)
    end = _in_background("trace-collector", lambda: collector.collect() >= 0)
    try:
        yield
    finally:
        end()


def _in_background(name: str, work: Callable[[], bool]) -> Callable[[], None]:
    """Call `work` every second in a thread, through outages, while it returns true.

    Returns a function that ends the thread after one last call.
    """
    stop = threading.Event()

    def run() -> None:
        failed = False
        while True:
            last = stop.wait(PERIOD_S)
            try:
                if not work():
                    return
                failed = False
            except LOGIN_REFUSED as error:  # retrying does not help
                log.warning("the trace ends here", extra={"part": name, "error": str(error)})
                return
            except (redis.RedisError, OSError) as error:
                if not failed:
                    log.warning("the trace waits", extra={"part": name, "error": str(error)})
                failed = True
            if last:
                return

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(END_S)

    return end
