"""Small real processes in place of the services, and a supervisor over them."""

from __future__ import annotations

import functools
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from headrace.local.processes import (
    Completed,
    ProcessFailed,
    ProcessState,
    SupervisedService,
    Supervisor,
    command,
)
from tests.waiting import until

DEADLINE_S = 20.0
FOREVER = "import time\nwhile True: time.sleep(1)"


wait_until = functools.partial(until, timeout_s=DEADLINE_S)


class Bench:
    """Makes services out of Python text and a supervisor out of services."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notes: list[str] = []
        self.supervisor: Supervisor | None = None

    def service(self, name: str, code: str, **options: object) -> SupervisedService:
        log = self.directory / f"{name}.log"
        argv = [sys.executable, "-S", "-c", textwrap.dedent(code)]
        return SupervisedService(name, log, command(argv, log, self.directory), **options)  # type: ignore[arg-type]

    def supervise(
        self,
        *services: SupervisedService,
        max_restarts: int = 1,
        start_timeout_s: float = 10.0,
        scratch: Path | None = None,
    ) -> Supervisor:
        self.supervisor = Supervisor(
            services,
            max_restarts=max_restarts,
            start_timeout_s=start_timeout_s,
            note=self.notes.append,
            scratch=scratch,
        )
        return self.supervisor

    def outcome(self) -> Completed | ProcessFailed:
        assert self.supervisor is not None
        end = time.monotonic() + DEADLINE_S
        while (found := self.supervisor.poll()) is None:
            assert time.monotonic() < end, "the run goes on and on"
            time.sleep(0.01)
        return found

    def poll_until(self, condition: Callable[[], object], what: str) -> None:
        supervisor = self.supervisor
        assert supervisor is not None

        def step() -> object:
            assert supervisor.poll() is None
            return condition()

        wait_until(step, what)

    def path(self, name: str) -> Path:
        return self.directory / name


def count_starts(name: str) -> str:
    return f"open({name!r}, 'a').write('x')\n"


def all_ready(supervisor: Supervisor) -> bool:
    return all(child.state is ProcessState.READY for child in supervisor.children.values())
