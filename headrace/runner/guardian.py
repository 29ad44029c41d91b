"""Find and kill the processes of a run, whatever became of their parents.

Every child of the runner carries a mark in its environment, which its own children inherit (torchrun's
workers and vLLM's engine processes lead sessions of their own and are nobody's children once their parent
was killed, so neither process groups nor ancestry finds them). Two users:

- the supervisor kills what an ended service left behind before it starts it again;
- this module run as a program waits until its stdin closes, which happens when the runner ends in any
  way, kill -9 included, and then kills every marked process. It inherits the run's lock, so the run
  counts as in use until the last process of it is gone.

Standard library only: the program starts in milliseconds and imports nothing of the package.
"""

from __future__ import annotations

import os
import signal
import sys
import time

MARK = "HEADRACE_PROCESS"
"""Environment variable: `<instance of the runner>/<service>/<number of the start>`."""

_DEADLINE_S = 15.0


def marked(mark: str) -> list[int]:
    """Process ids whose mark is `mark` or begins with `mark/`, without this process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _carries(int(name), mark):
            found.append(int(name))
    return found


def kill_marked(mark: str, deadline_s: float = _DEADLINE_S) -> bool:
    """SIGKILL everything marked until nothing is left; False when the deadline came first.

    A process is checked again once it is pinned by a descriptor: its number may have gone to another.
    """
    end = time.monotonic() + deadline_s
    while True:
        pids = marked(mark)
        if not pids:
            return True
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                if _carries(pid, mark):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
        if time.monotonic() > end:
            return False
        time.sleep(0.01)


def _carries(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")  # empty for a zombie
    except OSError:
        return False
    prefix = f"{MARK}={mark}".encode()
    return any(entry == prefix or entry.startswith(prefix + b"/") for entry in entries)


def main() -> int:
    """`guardian.py MARK`: wait for the end of stdin, then kill."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    return 0 if kill_marked(sys.argv[1]) else 1


if __name__ == "__main__":
    sys.exit(main())
