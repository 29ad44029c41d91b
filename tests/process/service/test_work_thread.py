"""Blocking calls of an event loop, in one thread of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from headrace.service.work_thread import WorkThread


async def test_all_calls_are_in_one_thread_one_after_the_other() -> None:
    thread = WorkThread("work")
    first = threading.Event()
    waiting = asyncio.create_task(thread.call(lambda: (first.wait(10), threading.get_ident())))
    after = asyncio.create_task(thread.call(threading.get_ident))
    await asyncio.sleep(0)  # the loop is free meanwhile
    assert not waiting.done()
    first.set()
    (waited, there), also_there = await asyncio.gather(waiting, after)
    assert waited
    assert there == also_there != threading.get_ident()
    thread.close()


async def test_what_is_raised_is_raised_to_who_called_and_the_thread_goes_on() -> None:
    thread = WorkThread("work")
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    assert await thread.call(max, 1, 2) == 2
    thread.close()


async def test_a_call_that_is_given_up_harms_nobody() -> None:
    thread, go_on = WorkThread("work"), threading.Event()
    given_up = asyncio.create_task(thread.call(go_on.wait, 10))
    await asyncio.sleep(0)
    given_up.cancel()
    go_on.set()
    assert await thread.call(max, 1, 2) == 2
    assert given_up.cancelled()
    thread.close()


def test_a_process_ends_while_a_call_hangs() -> None:
    program = """
import asyncio, threading
from headrace.service.work_thread import WorkThread
async def main():
    call = asyncio.create_task(WorkThread("work").call(threading.Event().wait))
    await asyncio.sleep(0)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
