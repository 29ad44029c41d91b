"""How a service ends: its exit code, and the sentence that says why.

    code  name              meaning                                             restarted
    0     -                 complete, or asked to end                           no
    1     EX_FAILED         a possibly transient error                          yes
    65    EX_BEYOND_REPAIR  a restart would fail in the same way                no
    69    EX_UNAVAILABLE    Redis did not answer within the configured wait     yes
    70    EX_SOFTWARE       a fault that needs a new process: an engine         yes
    71    EX_OSERR          the port is not available                           yes
    75    EX_STOPPED        a trainer was asked to stop and can be resumed      no
    78    EX_CONFIG         configuration, data or credentials are unusable     no

A password refused by Redis, or a token refused by the coordinator, is EX_CONFIG in every service. Whether a
restart fixes it depends on the supervisor. The local runner made both credentials itself and would pass the
same files again, so the run fails. A kubelet restarts a container after any code, with a growing delay, and
the container reads the Secret's files again: a pod that missed a change of the Secret picks up the new value.
Until the Secret is right, the pod waits in CrashLoopBackOff with the sentence in its status.

The sentence is the last line of the service's log. It is also written to a file for the supervisor: the local
runner names one, and a kubelet has its own, which `kubectl describe pod` shows.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from headrace.system.terminal import safe

EX_FAILED = 1
EX_BEYOND_REPAIR = 65
EX_UNAVAILABLE = 69
EX_SOFTWARE = 70
EX_OSERR = 71
EX_STOPPED = 75
EX_CONFIG = 78
FINAL = frozenset({EX_BEYOND_REPAIR, EX_CONFIG})
"""Codes after which a restart would not help: the run fails."""

REASON_FILE = "HEADRACE_REASON_FILE"
"""Environment variable: the file to which a service writes its sentence."""
_TERMINATION_LOG = "/dev/termination-log"
"""The file that a kubelet reads in every container."""


def say_why(service: str, reason: object) -> None:
    """Print `headrace-SERVICE: REASON`, the last output of a failing process. Log nothing after it."""
    text = safe(str(reason))  # may quote a model's output or an exception of user code
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        print(f"headrace-{service}: {text}", file=sys.stderr, flush=True)
    file = Path(os.environ.get(REASON_FILE, _TERMINATION_LOG))
    if REASON_FILE in os.environ or file.exists():
        with contextlib.suppress(OSError):  # it is in the log too
            file.write_text(text)
