"""Runs a reward function in processes of its own, with a deadline and a memory limit.

What this module guarantees:

- Every call ends: with a result, or with a RewardError if the function raised, returned no number, took
  longer than `timeout_s` (counted from its own start, not from an earlier call's), or ended its process. A
  process that hangs is killed with all that it started, in any session, and replaced.
- Nothing that a function started outlives its process, or the process that owns the pool (`keeper`).
- A call is blamed only for what it did itself. Calls queued behind one that hangs or crashes go to another
  process. When a process dies with several coroutines in progress, each of them is run again alone.
- Neither a function's process nor its keepers have the run's token or Redis URL in their environment. This
  does not protect against a function that looks for them: it can read whatever the run's user can.

The pool starts with one process. It adds more, up to `max_processes`, while none makes progress or the
backlog is too long. Calls are sent ahead, as many as a process handles in `_AHEAD_S`, so that tiny functions
do not wait for the round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from headrace.connections.variables import without_secrets
from headrace.rewards import frames
from headrace.rewards.function import RewardError
from headrace.rewards.keeper import KILL_S
from headrace.rewards.source import Judged, Response
from headrace.service.module_command import module_command

log = logging.getLogger("headrace.reward")

LOAD_S = 60.0
"""Longest time to import a function."""
_GROW_S = 0.25
"""Time without progress after which another process is started."""
_BACKLOG_S = 0.5
"""Backlog for which another process is started, in seconds of work for the current ones."""
_AHEAD_S = 0.02
_DEEPEST = 64
_CONCURRENT = 64
"""Most coroutines in progress in one process."""
_GRACE_S = 2.0
"""Time after its deadline in which a coroutine must be cancelled and reported."""


@dataclass(eq=False)
class _Call:
    number: int
    arguments: list[Any]
    future: asyncio.Future[Judged]
    alone: bool = False
    """The call was in progress when its process died. It runs alone next, to find out if it was to blame."""
    began: float = 0.0


@dataclass
class FunctionPool:
    """A `Source` that calls a function. The first process starts with `start` or the first call."""

    path: str
    name: str
    key: str
    """The configuration section that names the function, for error messages."""
    timeout_s: float
    max_processes: int = 4
    memory_limit_bytes: int = 4 * 1024**3
    _waiting: deque[_Call] = field(default_factory=deque)
    _processes: list[_Process] = field(default_factory=list)
    _number: int = 0
    _watching: asyncio.Task[None] | None = None
    _closed: bool = False

    async def start(self) -> None:
        """Load the function. Raises RewardError."""
        if not self._processes:
            try:
                process = self._spawn()
            except OSError as error:
                raise RewardError(f"{self.key}: no process can be started: {error}") from error
            await process.ready

    async def judge(self, response: Response) -> Judged:
        if self._closed:
            raise RewardError("the reward was closed")
        r = response
        self._number += 1
        call = _Call(
            self._number,
            [r.data_source, r.solution, r.ground_truth, r.extra_info],
            asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(call)
        self._dispatch()
        return await call.future

    async def close(self) -> None:
        """Kill the processes. Pending and waiting calls fail."""
        self._closed = True
        self._fail_waiting("the reward was closed")
        if self._watching is not None:
            self._watching.cancel()
        for process in (gone := list(self._processes)):
            process.kill("the reward was closed")
        await asyncio.gather(*(process.ended.wait() for process in gone))

    # -- calls -----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give waiting calls to processes that have room for them."""
        if not self._processes and self._waiting:
            try:
                self._spawn()
            except OSError as error:  # no memory, no more processes
                self._fail_waiting(f"{self.key}: no process can be started: {error}")
                return
        for process in self._processes:
            while self._waiting and process.takes(self._waiting[0]):
                call = self._waiting.popleft()
                if not call.future.done():  # nobody waits for it any more
                    self._send(process, call)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    def _send(self, process: _Process, call: _Call) -> None:
        try:
            frame = frames.encode([call.number, *call.arguments])
        except (TypeError, ValueError, RecursionError) as error:
            call.future.set_exception(RewardError(f"the row cannot be given to the reward: {error}"))
            return
        process.send(call, frame)

    def _spawn(self) -> _Process:
        process = _Process(self)
        self._processes.append(process)
        return process

    async def _watch(self) -> None:
        """Kill processes past their deadline, and add one when waiting calls make no progress."""
        tick = min(max(self.timeout_s / 10, 0.01), _GROW_S)
        while self._waiting or any(p.pending or not p.is_ready for p in self._processes):
            await asyncio.sleep(tick)
            now = time.monotonic()
            for process in list(self._processes):
                process.check(now)
            if self._waiting and self._needs_another(now):
                with contextlib.suppress(OSError):  # the existing processes carry on
                    self._spawn()

    def _needs_another(self, now: float) -> bool:
        there = self._processes
        if len(there) >= self.max_processes or not all(p.is_ready for p in there):
            return False
        backlog_s = len(self._waiting) * max((p.mean_s for p in there), default=0.0) / max(len(there), 1)
        return backlog_s > _BACKLOG_S or all(now - p.progress > _GROW_S for p in there)

    # -- what the processes call -----------------------------------------------------------------

    def _gone(self, process: _Process, innocent: list[_Call]) -> None:
        """Remove a process that has ended, and requeue its `innocent` calls."""
        self._processes.remove(process)
        self._waiting.extendleft(reversed([c for c in innocent if not c.future.done()]))
        if self._waiting and not self._closed:
            self._dispatch()

    def _could_not_load(self, error: RewardError) -> None:
        """Fail all waiting calls if no current process has loaded the function: another would fail too."""
        if not any(p.is_ready for p in self._processes):
            self._fail_waiting(str(error))

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            call = self._waiting.popleft()
            if not call.future.done():
                call.future.set_exception(RewardError(why))


class _Process(asyncio.Protocol):
    """One process and its socket."""

    def __init__(self, pool: FunctionPool) -> None:
        self._pool = pool
        self._decoder = frames.Decoder()
        self._transport: asyncio.Transport | None = None
        self.pending: dict[int, _Call] = {}
        """Calls sent and not yet answered, in sending order."""
        self.is_ready = False
        self.concurrent = False
        self.progress = time.monotonic()
        """Monotonic time of its last answer, or of the start of its oldest call."""
        self.mean_s = _AHEAD_S
        """Moving average of the seconds between answers."""
        self._blame = ""
        self._leaving = False
        self.ended = asyncio.Event()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            self._popen = _start(theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ready.add_done_callback(lambda future: future.exception())  # may be nobody's concern
        self._connecting = asyncio.create_task(self._connect(ours))

    async def _connect(self, ours: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._blame:  # killed before it was connected
            transport.abort()
            return
        pool = self._pool
        wanted = {"path": pool.path, "name": pool.name, "key": pool.key}
        limits = {"memory": pool.memory_limit_bytes, "timeout_s": pool.timeout_s}
        transport.write(frames.encode(wanted | limits))

    # -- calls -----------------------------------------------------------------------------------

    def takes(self, call: _Call) -> bool:
        """Whether the process has room for one more call."""
        if not self.is_ready or self._blame or self._leaving:
            return False
        if call.alone or any(c.alone for c in self.pending.values()):
            return not self.pending
        depth = _CONCURRENT if self.concurrent else 2 + int(min(_DEEPEST, _AHEAD_S / self.mean_s))
        return len(self.pending) < depth

    def send(self, call: _Call, frame: bytes) -> None:
        call.began = time.monotonic()
        if not self.pending:
            self.progress = call.began
        self.pending[call.number] = call
        assert self._transport is not None
        self._transport.write(frame)

    def check(self, now: float) -> None:
        """Kill the process if a call, or loading the function, is past its deadline."""
        if not self.is_ready:
            if now - self.progress > LOAD_S:
                self.kill(f"it did not load within {LOAD_S:g} s")
            return
        limit = self._pool.timeout_s
        if self.concurrent:  # the process cancels coroutines itself; this catches a blocked event loop
            late = any(now - c.began > limit + _GRACE_S for c in self.pending.values())
        else:
            late = bool(self.pending) and now - self.progress > limit
        if late:
            self.kill(f"the reward took longer than {limit:g} s")

    def kill(self, blame: str) -> None:
        """Kill the process. Its keeper kills everything that it started, in any session."""
        self._blame = self._blame or blame
        self._popen.send_signal(signal.SIGTERM)
        if self._transport is not None:
            self._transport.abort()  # a descendant may keep the other end open forever

    # -- what it says ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._blame:
            return  # too late
        try:
            for message in self._decoder.feed(data):
                self._message(message)
        except (frames.FrameError, TypeError, ValueError, KeyError, IndexError) as error:
            self.kill(f"its process said what nobody understands: {error!r}")
            return
        self._pool._dispatch()

    def _message(self, message: Any) -> None:
        if isinstance(message, list):
            self._answer(message)
        elif "failed" in message:
            self.ready.set_exception(RewardError(str(message["failed"])))
        elif message.get("leaving"):
            self._leaving = True
        else:
            self.concurrent, self.is_ready = bool(message["concurrent"]), True
            self.progress = time.monotonic()
            self.ready.set_result(None)

    def _answer(self, message: list[Any]) -> None:
        number, score, third, fourth = message
        call = self.pending.pop(number)
        now = time.monotonic()
        self.mean_s += 0.1 * (max(now - self.progress, 1e-6) - self.mean_s)
        self.progress = now
        if call.future.done():
            return
        if score is None:
            call.future.set_exception(RewardError(str(third), str(fourth)))
        else:
            parts = {str(key): float(value) for key, value in third.items()}
            call.future.set_result(Judged(float(score), parts, fourth))

    def connection_lost(self, error: Exception | None) -> None:
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        self._popen.send_signal(signal.SIGTERM)  # also for one that only closed its socket
        code = await asyncio.to_thread(self._wait)
        calls = list(self.pending.values())
        why = self._blame or f"the reward ended its process ({_exit(code)})"
        guilty, innocent = self._sentence(calls)
        for call in guilty:
            if not call.future.done():
                call.future.set_exception(RewardError(why))
        if not self.ready.done():
            self.ready.set_exception(
                RewardError(
                    f"{self._pool.key}: {self._pool.path}: {self._blame or f'its import {_exit(code)}'}"
                )
            )
        if (self._blame or guilty) and not self._pool._closed:
            log.warning("reward process ended", extra={"why": why, "path": self._pool.path})
        failure = self.ready.exception()
        if isinstance(failure, RewardError):
            self._pool._could_not_load(failure)
        self._pool._gone(self, innocent)
        self.ended.set()

    def _wait(self) -> int:
        """Wait until the process and everything that it started are gone. Returns the exit code."""
        try:
            return self._popen.wait(KILL_S + _GRACE_S)
        except subprocess.TimeoutExpired:  # the function has stopped its keeper
            self._popen.kill()
            return self._popen.wait()

    def _sentence(self, calls: list[_Call]) -> tuple[list[_Call], list[_Call]]:
        """Split the pending calls into (those to blame for the end, those to run again)."""
        if self._leaving:
            return [], calls
        if self._pool._closed:
            return calls, []
        if not self.concurrent:
            return calls[:1], calls[1:]
        if self._blame:
            limit = time.monotonic() - self._pool.timeout_s
            return [c for c in calls if c.began < limit], [c for c in calls if c.began >= limit]
        if len(calls) == 1:
            return calls, []
        for call in calls:
            call.alone = True
        return [], calls


def _start(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start a keeper, which forks the reward's process. Raises OSError."""
    return subprocess.Popen(
        module_command("headrace.rewards.keeper", str(connection.fileno()), str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stdout=2,  # what the function prints goes to the log
        pass_fds=[connection.fileno()],
        env=without_secrets(),
        start_new_session=True,
    )


def _exit(code: int) -> str:
    """A readable description of an exit code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"ended with {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
