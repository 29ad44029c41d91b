"""Find and kill all processes of a run, even those whose parents are dead.

Every child of the runner carries a mark in its environment, which its own children inherit. Neither process
groups nor ancestry would find them all: torchrun's workers and vLLM's engine processes lead their own
sessions, and are orphaned when their parent is killed. A marked process may also start children without the
mark (a sandbox clears the environment). They are found as its descendants, and killed before it. Two users:

- The supervisor kills what an ended service left behind before restarting it.
- This module, run as a program, waits until its stdin closes. That happens when the runner ends in any way,
  kill -9 included. It then kills every marked process and removes the run's temporary folder. It inherits
  the run's lock, so the run counts as in use until its last process is gone.

Processes that clean up the shared memory (/dev/shm) of dead ones get a moment to do so.

Standard library only: the program starts in milliseconds and imports nothing from the package.
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
"""Command-line substrings of processes that remove shared memory and then exit by themselves."""


def marked(mark: str) -> list[int]:
    """Ids of the processes whose mark is `mark` or begins with `mark/`, except this one."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _carries(int(name), mark):
            found.append(int(name))
    return found


def kill_marked(mark: str, deadline_s: float = _DEADLINE_S) -> bool:
    """SIGKILL everything marked until nothing is left. False if the deadline passes first.

    Each process is checked again once a descriptor pins it, because its id may have been reused.
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
    """Ids of the living descendants of `roots`, each with its parent's id."""
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
    """The parent of every living process; with `ended`, also of zombies."""
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
            entries = file.read().split(b"\0")  # empty for zombies
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
    """`guardian.py MARK [FOLDER]`: wait for stdin to close, then kill, then remove the folder."""
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
