"""Supervises a reward's process and kills all that it started: `python -m headrace.rewards.keeper FD PARENT`.

Killing the process group would not be enough: a sandbox puts its program into a session of its own, and a
daemon is reparented. The keeper is the subreaper of its descendants, so orphans become its children, and
everything that the reward's process started stays below it. It kills all of that

- when the reward's process ends, for whatever reason,
- at SIGTERM, which the pool sends when a call is past its deadline, and the kernel when the pool's process is
  gone.

There are two keepers, one the parent of the other, so that if one is killed (kill -9) the other does the
work. The lower one forks the reward's process. Each is in its own session, so a function that signals its own
group reaches no keeper. Both exit as the reward's process did, with the same code or signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from typing import NoReturn

from headrace.service.guardian import descendants

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
LOWER_S = 1.0
"""Longest wait for the lower keeper. A stopped one never exits."""
KILL_S = 5.0
"""Longest time spent killing descendants. A process that forks faster than it is killed survives this."""


def main() -> NoReturn:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for is_upper in (True, False):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before PDEATHSIG was set
            os._exit(1)
        parent = os.getpid()
        if child := os.fork():
            os.close(descriptor)  # so that the pool sees EOF as soon as the worker is gone
            _leave(_wait(child, is_upper))
        os.setsid()
    _work(descriptor, parent)


def _work(descriptor: int, keeper: int) -> NoReturn:
    """Run the reward's process."""
    from headrace.rewards.worker import serve

    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.set_inheritable(descriptor, False)  # children of the function must not keep the socket open
    serve(descriptor)


def _wait(child: int, is_keeper: bool) -> int:
    """Wait for the child or for SIGTERM, then kill all descendants.

    Returns the child's code as `os.waitstatus_to_exitcode` gives it.
    """
    code = None
    while code is None and signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        code = _reap().get(child)
    if code is None and is_keeper:
        code = _end(child)
    deadline = time.monotonic() + KILL_S
    while (found := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended = _reap()
        code = ended.get(child, code)
        if not ended:
            time.sleep(0.005)
    code = _reap().get(child, code)
    return -signal.SIGKILL if code is None else code


def _end(keeper: int) -> int | None:
    """Terminate the lower keeper and return its exit code, or None if it did not exit in time.

    Its code matters because it alone knows how the reward's process ended.
    """
    os.kill(keeper, signal.SIGTERM)
    deadline, code = time.monotonic() + LOWER_S, None
    while code is None and signal.sigtimedwait({signal.SIGCHLD}, max(0.0, deadline - time.monotonic())):
        code = _reap().get(keeper)
    return code


def _reap() -> dict[int, int]:
    """Reap the children that have ended. Returns their exit codes by process id."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            found[waited[0]] = os.waitstatus_to_exitcode(waited[1])
    return found


def _leave(code: int) -> NoReturn:
    """Exit as the child did, so that the parent sees the same code or signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the reward's own core dump is useful
        number = -code
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(max(code, 1) if code < 0 else code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
