"""Calls that block, for code in an event loop, in one thread that nobody waits for at the end."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class WorkThread:
    """Unlike those of `asyncio.to_thread`, the end of the process does not wait for this thread: a collective
    may hang. And all calls are in the same one: CUDA's current device, say, belongs to a thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """`function(*args)` in the thread, once those before it have returned. Raises what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():  # cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def work() -> None:
            result, error = None, None
            try:
                result = function(*args)
            except Exception as raised:  # for whoever awaits it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody awaits it
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.put(work)
        return await future

    def close(self) -> None:
        """The thread ends after the calls that were made. Returns at once."""
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
