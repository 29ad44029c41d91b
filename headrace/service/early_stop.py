"""A SIGTERM or a Ctrl-C that comes before a service is ready for it.

A service's own handlers come late: after imports of seconds, data that is read, an engine that loads. The
kernel's default ends a process that has none, but the first process of a container has no default: a signal
that it does not handle is dropped, and its pod would live on to the end of the grace period.
"""

from __future__ import annotations

import os
import signal


def end_when_told(code: int) -> None:
    """SIGTERM ends a container's first process with `code`, until the service has a handler of its own.

    Nothing is saved: there is nothing yet.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))


def end_when_interrupted(code: int) -> None:
    """Ctrl-C ends a service likewise, from this call in `main` on: Python's handler leaves a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL if os.getpid() != 1 else lambda *_: os._exit(code))
