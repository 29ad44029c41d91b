"""How a service ends: its exit code, and the sentence that says why.

    code  name              meaning                                             started again
    0     -                 complete, or told to end                            no
    1     EX_FAILED         an error that may pass                              yes
    65    EX_BEYOND_REPAIR  whatever is tried, it would end like this again     no
    69    EX_UNAVAILABLE    Redis did not answer for as long as it is waited    yes
    70    EX_SOFTWARE       a part that only a new process mends: an engine     yes
    71    EX_OSERR          the port cannot be had                              yes
    75    EX_STOPPED        a trainer that was told to stop, and can be resumed no
    78    EX_CONFIG         configuration, data or credentials cannot be used   no

A password that Redis refuses, or a token that the coordinator refuses, is EX_CONFIG in every service. Whether
a new start mends that depends on who starts it. The local runner made both credentials itself and would hand
over the same files again: the run fails. A kubelet starts a container again after any code, with a growing
delay, and the container reads the Secret's files anew: a pod that missed a change of the Secret comes back
with the new value. Until the Secret is right the pod waits in CrashLoopBackOff, the sentence in its status.

The sentence is the last line of the service's log. Whoever started the process finds it in a file, too: the
local runner names one, a kubelet has one of its own, which `kubectl describe pod` shows.
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
"""Starting the service again changes nothing: the run fails."""

REASON_FILE = "HEADRACE_REASON_FILE"
"""Environment variable: where a service leaves its sentence."""
_TERMINATION_LOG = "/dev/termination-log"
"""The kubelet's file in every container."""


def say_why(service: str, reason: object) -> None:
    """The last words of a process that fails, `headrace-SERVICE: REASON`: nothing is logged after them."""
    text = safe(str(reason))  # it may quote a model, or the exception of somebody's code
    with contextlib.suppress(OSError):  # no room for the log: the exit code counts all the same
        print(f"headrace-{service}: {text}", file=sys.stderr, flush=True)
    file = Path(os.environ.get(REASON_FILE, _TERMINATION_LOG))
    if REASON_FILE in os.environ or file.exists():
        with contextlib.suppress(OSError):  # the log has it all the same
            file.write_text(text)
