"""Handle a SIGTERM or Ctrl-C that arrives before a service has its own handlers.

A service installs its own handlers late: after slow imports, reading data or loading an engine. Until then
the kernel's default action ends the process. PID 1 of a container has no default action: a signal that it
does not handle is dropped, and the pod would live on until the end of its grace period.
"""

from __future__ import annotations

import os
import signal


def end_when_told(code: int) -> None:
    """Make SIGTERM end PID 1 with `code` until the service installs its own handler.

    Nothing is saved, because there is nothing to save yet.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))


def end_when_interrupted(code: int) -> None:
    """Make Ctrl-C end the service without the traceback of Python's own handler."""
    signal.signal(signal.SIGINT, signal.SIG_DFL if os.getpid() != 1 else lambda *_: os._exit(code))
