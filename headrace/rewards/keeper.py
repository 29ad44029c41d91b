"""Keeps one reward's process, and ends all that it started: `python -m headrace.rewards.keeper FD PARENT`.

A sandbox gives its program a session of its own, so that no signal to a process group reaches it, and a
daemon has no parent left that anybody knows. The keeper is the subreaper of its descendants: whatever loses
its parent becomes its child. What the reward's process started is therefore always below the keeper, and it
is killed from there

- when the reward's process ends, however it does,
- at SIGTERM: the pool's word that a call is past its deadline, or the kernel's that the pool's process is
  gone.

The keeper is two processes of the same kind, one the parent of the other: when one of them is killed (kill
-9), the other does this work. The reward's process is a fork of the lower one. Each is in a session of its
own: a function that signals its own group reaches no keeper. Both end as the reward's process did, with the
same code or signal.
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
"""Longest that the lower keeper is waited for; a stopped one never answers."""
KILL_S = 5.0
"""Longest that ending the descendants may take: one that forks faster than it is killed outlasts it."""


def main() -> NoReturn:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for is_upper in (True, False):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        parent = os.getpid()
        if child := os.fork():
            os.close(descriptor)  # the pool is to hear at once when the worker has gone
            _leave(_wait(child, is_upper))
        os.setsid()
    _work(descriptor, parent)


def _work(descriptor: int, keeper: int) -> NoReturn:
    """The reward's process."""
    from headrace.rewards.worker import serve

    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.set_inheritable(descriptor, False)  # what the function starts must not keep the socket open
    serve(descriptor)


def _wait(child: int, is_keeper: bool) -> int:
    """How the child ended, as `os.waitstatus_to_exitcode` says it, once nothing of it is left."""
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
    """How it ended once it was told to: it alone knows how the reward's process did. None: not in time."""
    os.kill(keeper, signal.SIGTERM)
    deadline, code = time.monotonic() + LOWER_S, None
    while code is None and signal.sigtimedwait({signal.SIGCHLD}, max(0.0, deadline - time.monotonic())):
        code = _reap().get(keeper)
    return code


def _reap() -> dict[int, int]:
    """Exit codes of the children that have ended, by process id."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            found[waited[0]] = os.waitstatus_to_exitcode(waited[1])
    return found


def _leave(code: int) -> NoReturn:
    """End as the child did, for whoever waits for this process."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the reward's core says more
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
