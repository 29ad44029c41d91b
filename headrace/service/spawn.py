"""Start child processes that do not outlive their parent.

Every child leads its own session, so the terminal's Ctrl-C does not reach it. The kernel kills it when the
*thread* that started it ends (PR_SET_PDEATHSIG), so start children from the main thread. This does not cover
grandchildren: `headrace.service.guardian` kills those, and our own programs call `die_with` for themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.service import guardian

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A function for a child of `parent` to call, between fork and exec or early in its life. From then on
    the child gets `number` when the thread that started it ends, in any way."""

    def arm() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
            if os.getppid() != parent:  # the parent died before the line above
                os._exit(1)

    return arm


def spawn(
    argv: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `argv`; stdout and stderr are appended to `log`, stdin is empty.

    Raises OSError when the program cannot be started.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(a) for a in argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )


def marked_env(env: Mapping[str, str], mark: str) -> dict[str, str]:
    """`env` plus the mark by which a process and its descendants can be found.

    SPT_NOENV keeps the setproctitle package, which vLLM uses, from overwriting the environment in /proc.
    """
    return {**env, guardian.MARK: mark, "SPT_NOENV": "1"}


class Guard:
    """The guardian process. `close` ends it, and with it every process that is still marked."""

    def __init__(self, mark: str, keep_fds: Sequence[int] = (), folder: Path | None = None) -> None:
        """`keep_fds` (the run's locks) stay open until all marked processes are gone; then `folder` is
        removed."""
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", guardian.__file__, mark, *([str(folder)] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(keep_fds),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, timeout_s: float = 20.0) -> bool:
        """Kill everything marked; return whether it is all gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            return self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            return False
