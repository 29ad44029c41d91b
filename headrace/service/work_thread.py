"""Run blocking calls for an event loop in one thread that does not delay the process's exit."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class WorkThread:
    """One daemon thread for all calls, unlike `asyncio.to_thread`.

    The process does not wait for it at exit, because a collective may hang. All calls run in the same thread,
    because state such as CUDA's current device is per thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run `function(*args)` in the thread, after earlier calls have returned. Raises what it raises."""
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
            except Exception as raised:  # raised in the awaiting task
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing awaits it
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.put(work)
        return await future

    def close(self) -> None:
        """End the thread after the calls already made. Returns at once."""
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
