"""Find and kill the processes of a run, whatever became of their parents.

Every child of the runner carries a mark in its environment, which its own children inherit (torchrun's
workers and vLLM's engine processes lead sessions of their own and are nobody's children once their parent
was killed, so neither process groups nor ancestry finds them). What a process with the mark has started
without it (a sandbox clears the environment) is found below that process, and goes first. Two users:

- the supervisor kills what an ended service left behind before it starts it again;
- this module run as a program waits until its stdin closes, which happens when the runner ends in any
  way, kill -9 included, then kills every marked process and removes the run's temporary folder. It inherits
  the run's lock, so the run counts as in use until the last process of it is gone.

Processes that remove the shared memory (/dev/shm) of others once those are gone are left a moment for it.

Standard library only: the program starts in milliseconds and imports nothing of the package.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

MARK = "HEADRACE_PROCESS"
"""Environment variable: `<instance of the runner>/<service>/<number of the start>`."""

_DEADLINE_S = 15.0
_TIDY_S = 2.0
_TIDIES = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""In the command line of what removes shared memory and then ends by itself."""


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
    tidy = time.monotonic() + min(_TIDY_S, deadline_s)
    while True:
        pids = marked(mark)
        if not pids:
            return True
        below = {pid: parent for pid, parent in descendants(*pids).items() if pid not in pids}
        for pid in [*below, *pids]:
            if time.monotonic() < tidy and _tidies(pid):
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                if _carries(pid, mark) or (pid in below and parents().get(pid) == below[pid]):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
        if time.monotonic() > end:
            return False
        time.sleep(0.01)


def descendants(*roots: int) -> dict[int, int]:
    """Process ids of all that is alive below `roots`, each with its parent's."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents(ended=True).items():
        children.setdefault(parent, []).append(pid)
    alive, found, below = parents(), {}, list(roots)
    while below:
        for pid in children.get(parent := below.pop(), []):
            below.append(pid)
            if pid in alive:
                found[pid] = parent
    return found


def parents(ended: bool = False) -> dict[int, int]:
    """The parent of every process that is alive; with `ended` of those, too, that nobody has waited for."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if ended or state not in "ZX":
                found[int(name)] = int(parent)
    return found


def _carries(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")  # empty for a zombie
    except OSError:
        return False
    prefix = f"{MARK}={mark}".encode()
    return any(entry == prefix or entry.startswith(prefix + b"/") for entry in entries)


def _tidies(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
    except OSError:
        return False
    return any(name in words for name in _TIDIES)


def main() -> int:
    """`guardian.py MARK [FOLDER]`: wait for the end of stdin, then kill and remove the folder."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    gone = kill_marked(sys.argv[1])
    for folder in sys.argv[2:]:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if gone else 1


if __name__ == "__main__":
    sys.exit(main())
