"""The program of a reward's process: its keeper (`headrace.rewards.keeper`) calls `serve(descriptor)`.

The descriptor is a socket to the pool (messages: see `frames`). A plain function runs in the main thread, one
call at a time, because libraries that implement time limits with signals work only there. A coroutine
function runs in an event loop, with as many concurrent calls as the pool sends. The pool enforces the
deadline by killing the process. A late coroutine is cancelled here before that.

What the function prints goes to stderr, and its stdin is empty. RLIMIT_DATA limits its memory. It counts
private writable memory only, not address space that libraries (torch, CUDA) merely reserve.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import resource
import socket
import sys
import traceback
from collections.abc import Coroutine
from typing import Any, NoReturn

from headrace.rewards import frames
from headrace.rewards.function import RewardError, RewardFunction, bind_arguments, load_reward, parse_score
from headrace.system import terminal

CANCEL_S = 1.0
"""Time that a cancelled coroutine has to clean up."""
_TRACEBACK = 3500
_FULL = 0.8
"""Fraction of the memory limit above which a process is replaced after an error."""


def answer_of(result: Any) -> str | None:
    """The `pred` of a reward's dictionary, which counts in a majority vote."""
    answer = result.get("pred") if isinstance(result, dict) else None
    return None if answer is None else str(answer)


def _success(number: int, result: Any) -> bytes:
    score, parts = parse_score(result)
    return frames.encode([number, score, parts, answer_of(result)])


def _failure(number: int, error: BaseException) -> bytes:
    if isinstance(error, RewardError):
        return frames.encode([number, None, str(error), ""])
    trace = "".join(traceback.format_exception(error))[-_TRACEBACK:]
    return frames.encode([number, None, f"the reward raised {error!r}"[:1000], trace])


class _Process:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = 0
        self._sending = asyncio.Lock()

    def main(self) -> None:
        decoder = frames.Decoder()
        messages: list[Any] = []
        while not messages:
            data = self._connection.recv(1 << 20)
            if not data:
                return
            messages = decoder.feed(data)
        wanted, *calls = messages
        self._memory = int(wanted["memory"])
        resource.setrlimit(resource.RLIMIT_DATA, (self._memory, self._memory))
        try:
            function = load_reward(wanted["path"], wanted["name"], wanted["key"])
        except RewardError as error:
            self._send(frames.encode({"failed": str(error)}))
            return
        concurrent = inspect.iscoroutinefunction(function)
        self._send(frames.encode({"ready": True, "concurrent": concurrent}))
        if concurrent:
            asyncio.run(self._concurrently(function, decoder, calls, float(wanted["timeout_s"])))
        else:
            self._one_by_one(function, decoder, calls)

    def _send(self, frame: bytes) -> None:
        self._connection.sendall(frame)

    # -- plain functions -------------------------------------------------------------------------

    def _one_by_one(self, function: RewardFunction, decoder: frames.Decoder, calls: list[Any]) -> None:
        while True:
            for call in calls:
                self._call(function, call)
            data = self._connection.recv(1 << 20)
            if not data:
                return
            calls = decoder.feed(data)

    def _call(self, function: RewardFunction, call: list[Any]) -> None:
        number = call[0]
        try:
            bound = bind_arguments(function, *call[1:])
            result = function(*bound.args, **bound.kwargs)
            if inspect.isawaitable(result):  # such as functools.partial of a coroutine function
                result = asyncio.run(_awaited(result))
            frame, error = _success(number, result), None
        except BaseException as caught:  # user code: SystemExit and the like must not end anything here
            frame, error = _failure(number, caught), caught
        self._send(frame)
        if error is not None:
            self._leave_if_full(error)

    def _leave_if_full(self, error: BaseException) -> None:
        """End the process if memory is nearly used up: what the function keeps would fail later calls too."""
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[5]) * resource.getpagesize()
        if isinstance(error, MemoryError) or used > _FULL * self._memory:
            self._send(frames.encode({"leaving": True}))
            _end()

    # -- coroutine functions ---------------------------------------------------------------------

    async def _concurrently(
        self, function: RewardFunction, decoder: frames.Decoder, calls: list[Any], timeout_s: float
    ) -> None:
        self._connection.setblocking(False)
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()
        while True:
            for call in calls:
                task = asyncio.create_task(self._await(function, call, timeout_s))
                running.add(task)
                task.add_done_callback(running.discard)
            data = await loop.sock_recv(self._connection, 1 << 20)
            if not data:
                return
            calls = decoder.feed(data)

    async def _await(self, function: RewardFunction, call: list[Any], timeout_s: float) -> None:
        number = call[0]
        error: BaseException | None = None
        try:
            bound = bind_arguments(function, *call[1:])
            task = asyncio.create_task(_held(function(*bound.args, **bound.kwargs)))
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            if not done:
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_S)
                raise RewardError(f"the reward took longer than {timeout_s:g} s")
            if task.cancelled():
                raise RewardError("the reward cancelled itself")
            result, error = task.result()
            frame = _success(number, result) if error is None else _failure(number, error)
        except BaseException as caught:  # user code
            frame, error = _failure(number, caught), caught
        async with self._sending:  # frames must not interleave
            await asyncio.get_running_loop().sock_sendall(self._connection, frame)
            if error is not None:
                self._connection.setblocking(True)
                self._leave_if_full(error)
                self._connection.setblocking(False)


async def _held(call: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Return (result, exception) instead of raising: SystemExit in a task would end the event loop."""
    try:
        return await call, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # user code
        return None, error


async def _awaited(result: Any) -> Any:
    return await result


def _end() -> NoReturn:
    """Exit at once, without waiting for the function's threads and exit handlers."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def serve(descriptor: int) -> NoReturn:
    """Serve calls of the function that the pool names until the pool closes the connection."""
    terminal.guard()  # a function may print a response, whose control characters must not reach a terminal
    with contextlib.suppress(ConnectionError, frames.FrameError):
        _Process(socket.socket(fileno=descriptor)).main()
    _end()
