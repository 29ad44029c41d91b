"""Supervision: services are started in order, restarted when they exit, stopped in order.

    state      event                                      next
    waiting    every service of earlier stages was ready   starting
    starting   its readiness check passes                  ready
    starting   deadline, never ready before                run failed
    starting   deadline, was ready before                  killed, as an exit
    starting, ready   exit 0 of the service that completes the run   run completed
    starting, ready   final exit code (`endings`)          run failed
    starting, ready   exit, restarts left                  backoff
    starting, ready   exit, no restarts left               run failed
    backoff    the pause is over                           starting
    any        `retire`                                    leaving (SIGTERM), or forgotten if not running
    leaving    exit, or killed at its deadline             forgotten; the exit does not count

Where the table says `run failed`, a service that is not essential is given up and the run continues.

A service writes why it ended to a file that its environment names. Reports of its exit include that sentence.

Guarantees:

- Before a service restarts, every process that its previous start left behind is dead.
- Signals from the terminal never reach a service.
- Nothing here blocks for longer than one readiness check, except `stop`, which has a deadline.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.local.scratch import emptied
from headrace.service.exits import describe_exit
from headrace.service.guardian import kill_marked
from headrace.service.spawn import Guard, marked_env, spawn
from headrace.system.endings import EX_CONFIG, FINAL, REASON_FILE

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 10.0
KILL_WAIT_S = 10.0
FORGIVEN_AFTER_S = 120.0
"""Uptime after which a service that made progress gets its exit count reset. Occasional crashes over days
must not add up to a failure."""
_PROBE_EVERY_S = 0.2
_POLL_S = 0.05

Start = Callable[[Mapping[str, str]], subprocess.Popen[bytes]]
"""Starts the process with the given environment."""


class ProcessState(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    LEAVING = "leaving"
    ENDED = "ended"


@dataclass(frozen=True)
class SupervisedService:
    """One supervised process."""

    name: str
    log: Path
    start: Start
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ready: Callable[[], bool] | None = None
    """Cheap check that answers within a second. None: ready as soon as it runs."""
    stage: int = 0
    """Starts once every service of a lower stage has been ready."""
    completes: bool = False
    """Exit code 0 completes the run."""
    essential: bool = True
    """If it fails, the run fails."""
    says: Callable[[], str] | None = None
    """Why it ended, for a service that writes no reason file; empty if unknown."""
    progress: Callable[[], object] | None = None
    """A value that changes as the service makes progress. Exits without progress in between all count,
    however far apart."""


def command(argv: Sequence[str | Path], log: Path, cwd: Path | None = None) -> Start:
    """The usual `Start`: a command line whose output is appended to `log`."""
    return lambda env: spawn(argv, log=log, env=env, cwd=cwd)


@dataclass(frozen=True)
class Completed:
    """The run is complete."""


@dataclass(frozen=True)
class ProcessFailed:
    """The run cannot continue. `reason` is a sentence; `log` is the service's log file."""

    service: str
    reason: str
    log: Path
    told: bool = False
    """The service gave the reason itself, so its log need not be shown."""


@dataclass
class Child:
    """A service's current process and its history."""

    service: SupervisedService
    state: ProcessState = ProcessState.WAITING
    process: subprocess.Popen[bytes] | None = None
    mark: str = ""
    starts: int = 0
    exits: int = 0
    """Exits that count against the restart limit; see `FORGIVEN_AFTER_S`."""
    was_ready: bool = False
    exit_code: int | None = None
    started_at: float = 0.0
    got_to: object = None
    deadline: float = 0.0
    due: float = 0.0
    next_probe: float = 0.0

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def reason_file(self) -> Path:
        return self.service.log.with_suffix(".reason")

    def reason(self) -> str:
        """Why its last process ended, in its own words; empty when it said nothing."""
        try:
            return " ".join(self.reason_file.read_text().split())
        except OSError:
            return self.service.says() if self.service.says else ""


class Supervisor:
    """Starts, restarts and stops services. Call `poll` a few times a second from the main thread."""

    def __init__(
        self,
        services: Sequence[SupervisedService],
        *,
        max_restarts: int,
        start_timeout_s: float,
        note: Callable[[str], None] = lambda text: None,
        keep_fds: Sequence[int] = (),
        scratch: Path | None = None,
    ) -> None:
        """`note` receives a sentence on every restart. `keep_fds` stay open until the run's last process is
        gone; then `scratch`, which holds a temporary folder for each service, is removed."""
        self.children = {service.name: Child(service) for service in services}
        self.given_up: list[str] = []
        """Names of non-essential services that could not be kept running."""
        self.instance = secrets.token_hex(8)
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._note = note
        self._scratch = scratch
        self._guard = Guard(self.instance, keep_fds, scratch)

    def poll(self) -> Completed | ProcessFailed | None:
        """Advance every service one step; None while the run continues."""
        for child in list(self.children.values()):
            outcome = self._advance(child, time.monotonic())
            if isinstance(outcome, ProcessFailed) and not child.service.essential:
                self._give_up(child, outcome)
            elif outcome is not None:
                return outcome
        return None

    def _give_up(self, child: Child, failed: ProcessFailed) -> None:
        self._note(f"{failed.reason}; the run goes on without it (log: {failed.log})")
        if child.process is not None and child.running:
            child.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the guardian kills it once more
                child.process.wait(KILL_WAIT_S)
        self._forget(child)
        self.given_up.append(child.name)

    def add(self, service: SupervisedService) -> None:
        """Supervise one more service. Raises ValueError if the name is taken."""
        if service.name in self.children:
            raise ValueError(f"{service.name} is there already")
        self.children[service.name] = Child(service)

    def retire(self, name: str, grace_s: float) -> None:
        """Stop one service with SIGTERM and forget it; kill it after `grace_s` seconds.

        Returns at once; `poll` does the rest.
        """
        child = self.children[name]
        if child.process is not None and child.running:
            child.state = ProcessState.LEAVING
            child.deadline = time.monotonic() + grace_s
            child.process.send_signal(signal.SIGTERM)
            child.process.send_signal(signal.SIGCONT)  # a stopped process gets SIGTERM only once it continues
        else:
            self._forget(child)

    def _forget(self, child: Child) -> None:
        child.state = ProcessState.ENDED
        kill_marked(child.mark)
        del self.children[child.name]

    def pids(self) -> dict[str, int]:
        """Process ids of the running services, by name."""
        return {c.name: c.process.pid for c in self.children.values() if c.process is not None and c.running}

    def _advance(self, child: Child, now: float) -> Completed | ProcessFailed | None:
        if child.state is ProcessState.WAITING:
            earlier = (c for c in self.children.values() if c.service.stage < child.service.stage)
            return self._start(child, now) if all(c.was_ready for c in earlier) else None
        if child.state is ProcessState.BACKOFF:
            return self._start(child, now) if now >= child.due else None
        if child.process is None or child.state is ProcessState.ENDED:
            return None
        code = child.process.poll()
        if code is not None:
            return self._exited(child, code, now)
        if child.state is ProcessState.LEAVING and now >= child.deadline:
            self._note(f"{child.name} did not leave in time and is killed; its work goes back")
            child.process.kill()
            return None
        if child.state is ProcessState.STARTING:
            return self._starting(child, now)
        return None

    def _start(self, child: Child, now: float) -> ProcessFailed | None:
        child.starts += 1
        child.mark = f"{self.instance}/{child.name}/{child.starts}"
        try:
            child.reason_file.unlink(missing_ok=True)
            env = {**child.service.env, REASON_FILE: str(child.reason_file)}
            if self._scratch is not None:
                env["TMPDIR"] = str(emptied(self._scratch, child.name))
            child.process = child.service.start(marked_env(env, child.mark))
        except (OSError, RuntimeError) as error:
            return ProcessFailed(child.name, f"{child.name} cannot be started: {error}", child.service.log)
        child.state = ProcessState.STARTING
        child.started_at = now
        child.deadline = now + self._start_timeout_s
        child.next_probe = now
        return self._starting(child, now) if child.service.ready is None else None

    def _starting(self, child: Child, now: float) -> ProcessFailed | None:
        ready = child.service.ready
        if ready is not None:
            if now < child.next_probe:
                return None
            child.next_probe = now + _PROBE_EVERY_S
        if ready is None or ready():
            child.state = ProcessState.READY
            child.was_ready = True
            return None
        if now >= child.deadline:
            if not child.was_ready:
                reason = f"{child.name} was not ready within {self._start_timeout_s:.0f} s of its start"
                return ProcessFailed(child.name, reason, child.service.log)
            assert child.process is not None
            child.process.kill()  # seen as an exit by the next poll
        return None

    def _exited(self, child: Child, code: int, now: float) -> Completed | ProcessFailed | None:
        child.exit_code = code
        if child.state is ProcessState.LEAVING:
            self._forget(child)
            self._note(f"{child.name} has left")
            return None
        was_up = child.state is ProcessState.READY
        child.state = ProcessState.ENDED
        kill_marked(child.mark)
        if child.service.completes and code == 0:
            return Completed()
        why = child.reason()
        if code in FINAL:
            blank = "its configuration is at fault" if code == EX_CONFIG else "it cannot go on"
            return ProcessFailed(
                child.name, f"{child.name}: {why or blank}", child.service.log, told=bool(why)
            )
        got_to = child.service.progress() if child.service.progress else now
        if was_up and now - child.started_at >= FORGIVEN_AFTER_S and got_to != child.got_to:
            child.exits = 0
        child.got_to = got_to
        child.exits += 1
        how = describe_exit(child.name, code)
        if child.exits > self._max_restarts:
            times = "once" if child.exits == 1 else f"{child.exits} times"
            reason = f"{child.name}: {why} (exit code {code}, {times})" if why else f"{how} ({times})"
            return ProcessFailed(child.name, reason, child.service.log, told=bool(why))
        how += f": {why}" if why else ""
        pause = min(BACKOFF_FIRST_S * 2 ** (child.exits - 1), BACKOFF_MAX_S)
        child.state, child.due = ProcessState.BACKOFF, now + pause
        self._note(
            f"{how}; restart {child.exits} of {self._max_restarts} in {pause:g} s (log: {child.service.log})"
        )
        return None

    def stop(
        self, names: Sequence[str], grace_s: float, hurry: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Send SIGTERM to all of `names`, then SIGKILL after `grace_s` seconds or once `hurry()`, and wait.

        Returns the names that had to be killed. Nothing is restarted in the meantime.
        """
        children = [self.children[name] for name in names if name in self.children]
        running = [c for c in children if c.running and c.process is not None]
        for child in running:
            assert child.process is not None
            child.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + grace_s
        while any(c.running for c in running) and time.monotonic() < end and not hurry():
            time.sleep(_POLL_S)
        killed = [c.name for c in running if c.running]
        self._kill(children)
        return killed

    def kill_all(self) -> None:
        """SIGKILL everything at once."""
        self._kill(list(self.children.values()))

    def close(self) -> None:
        """Kill whatever is left and end the guardian. Must be the last call."""
        self.kill_all()
        self._guard.close()

    def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.process is not None and child.running:
                child.process.kill()
        for child in children:
            if child.process is not None:
                try:
                    child.exit_code = child.process.wait(KILL_WAIT_S)
                except subprocess.TimeoutExpired:
                    self._note(f"{child.name} (process {child.process.pid}) does not end even when killed")
                kill_marked(child.mark)
            child.state = ProcessState.ENDED
