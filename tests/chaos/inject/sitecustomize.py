"""Python loads this at the start of every process of a run under test: it strikes at named moments.

A file `HEADRACE_CHAOS_DIR/at-MOMENT` says what is to happen (`kill` or `stop`) to the first process that
comes to that moment; the file is gone afterwards. The services know nothing of it: their methods are wrapped
when their modules are imported.

It also sets the wall clock of a service wrong, by the seconds in `HEADRACE_CHAOS_DIR/clock-SERVICE`, and
leads the way to the coordinator through `HEADRACE_CHAOS_COORDINATOR`, a proxy.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MOMENTS: dict[str, tuple[str, str, str, str]] = {
    # moment: module, class, method, before or after it
    "member-pauses": ("headrace_rollouter.membership.member", "Member", "_pause", "before"),
    "member-joins": ("headrace_rollouter.membership.member", "Member", "_join", "before"),
    "member-receives": (
        "headrace_rollouter.inference.transfer_engine",
        "HeadraceTransferEngine",
        "_receive",
        "before",
    ),
    "member-has-loaded": ("headrace_rollouter.inference.engine", "Engine", "load", "after"),
    "member-resumes": ("headrace_rollouter.membership.member", "Member", "_resume", "before"),
    "trainer-writes-snapshot": (
        "headrace_trainer.sync.weight_server",
        "WeightServer",
        "write_snapshot",
        "before",
    ),
    "trainer-forms": ("headrace_trainer.sync.weight_server", "WeightServer", "form", "before"),
    "trainer-sends": ("headrace_trainer.sync.weight_server", "WeightServer", "_broadcast", "before"),
    "trainer-has-sent": ("headrace_trainer.sync.weight_server", "WeightServer", "send", "after"),
    "trainer-acknowledges": ("headrace_trainer.loop", "Trainer", "_acknowledge", "before"),
    "trainer-saves": ("headrace_trainer.checkpoints.checkpoint", "Checkpoints", "_publish", "before"),
    "coordinator-holds": ("headrace_coordinator.rounds.driver", "Driver", "_round", "before"),
    "coordinator-commits": ("headrace_coordinator.rounds.driver", "Driver", "_commit", "before"),
    "coordinator-has-committed": ("headrace_coordinator.rounds.driver", "Driver", "_commit", "after"),
}


def strike(moment: str) -> None:
    """Do what the moment's file says, once."""
    directory = os.environ.get("HEADRACE_CHAOS_DIR")
    if not directory:
        return
    file = os.path.join(directory, f"at-{moment}")
    mine = f"{file}.{os.getpid()}"
    try:
        os.rename(file, mine)  # one process only
    except OSError:
        return
    with open(mine) as told:
        what = told.read()
    with open(os.path.join(directory, f"struck-{moment}"), "w") as out:
        out.write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)


def wrapped(method: Callable[..., Any], moment: str, when: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def later(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                strike(moment)
            result = await method(*args, **kwargs)
            if when == "after":
                strike(moment)
            return result

        return later

    @functools.wraps(method)
    def now(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            strike(moment)
        result = method(*args, **kwargs)
        if when == "after":
            strike(moment)
        return result

    return now


def patch(module: ModuleType) -> None:
    for moment, (name, class_name, method, when) in MOMENTS.items():
        if name == module.__name__:
            owner = getattr(module, class_name)
            setattr(owner, method, wrapped(getattr(owner, method), moment, when))


class Loader(importlib.abc.Loader):
    """The module's own loader, and then `patch`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        patch(module)


class Finder(importlib.abc.MetaPathFinder):
    targets = frozenset(name for name, *_ in MOMENTS.values())

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.targets:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


def bend_clock(directory: str, reason_file: str) -> None:
    """The wall clock of this process, as a step of its host's clock would; the monotonic one never jumps.

    A service is known by the file for its last words, which its children inherit. The file with the seconds
    is mapped: a clock is read often.
    """
    service = os.path.splitext(os.path.basename(reason_file))[0]
    descriptor = os.open(os.path.join(directory, f"clock-{service}"), os.O_RDWR | os.O_CREAT, 0o600)
    if os.fstat(descriptor).st_size < 8:
        os.ftruncate(descriptor, 8)  # zeros: no seconds
    seconds = mmap.mmap(descriptor, 8, prot=mmap.PROT_READ)
    os.close(descriptor)
    real, real_ns = time.time, time.time_ns

    def off() -> float:
        return float(struct.unpack("<d", seconds[:8])[0])

    time.time = lambda: real() + off()
    time.time_ns = lambda: real_ns() + int(off() * 1e9)


if os.environ.get("HEADRACE_CHAOS_DIR"):
    sys.meta_path.insert(0, Finder())
    if "HEADRACE_REASON_FILE" in os.environ:
        bend_clock(os.environ["HEADRACE_CHAOS_DIR"], os.environ["HEADRACE_REASON_FILE"])
    if "HEADRACE_COORDINATOR" in os.environ and "HEADRACE_CHAOS_COORDINATOR" in os.environ:
        os.environ["HEADRACE_COORDINATOR"] = os.environ["HEADRACE_CHAOS_COORDINATOR"]
