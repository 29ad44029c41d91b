"""One start of a run, from the first process to the summary.

It ends in one of three ways. Each stops every process and writes `summary.json`:

    completed   the trainer exited with code 0                exit code 0
    stopped     Ctrl-C or SIGTERM; can be resumed             exit code 130
    failed      a service has used up its restarts            exit code 1
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any

import redis

from headrace.config import loading
from headrace.config.loading import ConfigError
from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, LedgerWentBack, SyncLedger
from headrace.ledger.marks import Marks
from headrace.ledger.replies import Stats
from headrace.local import assets, preflight, scratch
from headrace.local.memory import MemoryRecord
from headrace.local.processes import Completed, ProcessFailed, ProcessState, Supervisor
from headrace.local.progress import Display, RunProgress, StatsPoll
from headrace.local.prometheus import LocalPrometheus
from headrace.local.scaling import Scaling
from headrace.local.services import (
    ROLLOUTER,
    Endpoints,
    choose_endpoints,
    plan,
    service_table,
    stop_groups,
    write_secrets,
)
from headrace.records import summary as summaries
from headrace.records.audit import RunAudit, audit_run
from headrace.records.json_files import MetricsTail, write_json
from headrace.records.layout import RunLayout, RunLock
from headrace.service.exits import describe_exit, last_lines
from headrace.service.spawn import spawn
from headrace.system.disk import DiskFull
from headrace.system.endings import EX_STOPPED

EXIT_COMPLETED, EXIT_FAILED, EXIT_STOPPED = 0, 1, 130
_POLL_S = 0.05
_TICK_S = 1.0
_FAIL_GRACE_S = 5.0
_LOG_LINES = 20
_LAST_READING_S = 120.0
"""The audit at the end may read millions of samples."""
_STARTING = (ProcessState.WAITING, ProcessState.STARTING, ProcessState.BACKOFF)


class Signals:
    """Counts Ctrl-C, SIGTERM and SIGHUP instead of letting them end the process."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._seen)
        return self

    def _seen(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class LocalRun:
    """Owns the processes of one start. `run`, then `close` whatever happened."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        lock: RunLock,
        display: Display,
        signals: Signals,
        resume_command: str,
        prometheus: LocalPrometheus | None = None,
    ) -> None:
        """`config` is as requested: paths are absolute, `demo:` names are not resolved yet."""
        self.prometheus = prometheus
        self.requested = config
        self.config = config
        self.layout = layout
        self.display = display
        self.signals = signals
        self.resume_command = resume_command
        self.memory = MemoryRecord()
        self.progress = RunProgress(plan(config).updates)
        self._lock = lock
        self._scratch: scratch.Scratch | None = None
        self._began = time.monotonic()
        self._ends: Endpoints | None = None
        self._scaling: Scaling | None = None
        self._supervisor: Supervisor | None = None
        self._watch: StatsPoll | None = None
        self._tail = MetricsTail(layout.metrics, from_end=True)
        self._next_tick = 0.0
        self._written_pids: dict[str, int] = {}

    def run(self) -> int:
        """Run from start to summary; return the exit code.

        Raises ConfigError for problems that only show once the demo's files exist.
        """
        self._scratch = scratch.create()
        ready = assets.demo_ready(self.config)
        if not ready and not self._prepare_demo():
            return self._end("stopped", None)
        self.config = assets.resolve(self.config)
        if not ready and (problems := preflight.examine(self.config).problems):
            raise ConfigError(problems)
        loading.write(self.config, self.layout.config)
        loading.write(self.requested, self.layout.requested)
        token, password = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        ends = choose_endpoints(self.config, self._scratch.root, token, password)
        self._ends = ends
        services = self.config.services
        write_secrets(self.layout, ends)
        table = service_table(self.config, self.layout, ends)
        if self.prometheus is not None:
            self.prometheus.follow(ends)
            table.append(self.prometheus.service())
            self.display.note(f"Prometheus: {self.prometheus.url} (data: {self.layout.prometheus})")
        supervisor = Supervisor(
            table,
            max_restarts=services.max_restarts,
            start_timeout_s=services.start_timeout_s,
            note=self.display.note,
            keep_fds=[self._lock.descriptor, self._scratch.descriptor],
            scratch=self._scratch.root,
        )
        self._supervisor = supervisor
        self._scaling = Scaling(self.config, self.layout, ends, supervisor, self.display.note)
        self._watch = StatsPoll(ends.redis_url, self.config.name)
        outcome = self._supervise(supervisor)
        if isinstance(outcome, Completed):
            self.display.phase("complete; stopping the services")
            self._stop_in_order(supervisor, hurry_at=1)
            return self._end("completed", None)
        if isinstance(outcome, ProcessFailed):
            return self._fail(supervisor, outcome)
        return self._stop_on_request(supervisor)

    def close(self) -> None:
        """Stop every process that is left. Safe after any error."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None
        self.display.close()

    # -- while it runs --------------------------------------------------------------------------------

    def _prepare_demo(self) -> bool:
        """Make the demo's model and data; False when stopped. Raises ConfigError."""
        log = self.layout.log("demo")
        assert self._scratch is not None
        env = {**os.environ, "TMPDIR": str(scratch.emptied(self._scratch.root, "demo"))}
        process = spawn(assets.demo_command(self.config), log=log, env=env)
        try:
            while process.poll() is None and not self.signals.count:
                said = last_lines(log, 1)
                progress = f": {said[0]}" if said and said[0].startswith("warm-up") else ""
                self.display.phase(f"preparing the demo model, once{progress}")
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            code = process.wait()
        if self.signals.count:
            self._say_stopping()
            return False
        if code or not assets.demo_ready(self.config):
            shown = "\n".join(f"    {line}" for line in last_lines(log, 5))
            raise ConfigError([f"the demo cannot be prepared ({describe_exit('it', code)}); {log}:\n{shown}"])
        return True

    def _supervise(self, supervisor: Supervisor) -> Completed | ProcessFailed | None:
        """Poll until the run completes, fails, or is asked to stop (None)."""
        while not self.signals.count:
            outcome = supervisor.poll()
            if outcome is not None:
                return outcome
            if time.monotonic() >= self._next_tick:
                self._tick(supervisor)
                self._next_tick = time.monotonic() + _TICK_S
            time.sleep(_POLL_S)
        return None

    def _tick(self, supervisor: Supervisor) -> None:
        """Scale the rollouters, then update endpoints.json, the memory record and the display.

        Called once a second.
        """
        if self._scaling is not None:
            self._scaling.tick()
            self._ends = self._scaling.ends
        if self.prometheus is not None and self._ends is not None:
            self.prometheus.follow(self._ends)
        pids = supervisor.pids()
        if pids != self._written_pids and self._ends is not None:
            try:
                write_json(self.layout.endpoints, endpoints_json(self._ends, pids), mode=0o600)
            except DiskFull as error:  # the services do not need the file; the next change retries
                self.display.note(str(error))
            self._written_pids = pids
        self.progress.add_rows(self._tail.new_rows(), time.monotonic())
        self.progress.read_scores(self.layout.eval)
        self.progress.stats = self._watch.stats if self._watch else None
        self.progress.services = {c.name: str(c.state) for c in supervisor.children.values()}
        if self.progress.arrivals:  # not before training: memory growth at startup would look like a leak
            self.memory.sample(pids)
        self.display.phase(phase_text(supervisor, self.progress))
        self.display.update(self.progress)

    # -- the end --------------------------------------------------------------------------------------

    def _say_stopping(self) -> None:
        self.display.note(f"stopping, the run can be resumed with: {self.resume_command}")

    def _stop_on_request(self, supervisor: Supervisor) -> int:
        self._say_stopping()
        self.display.phase("stopping; Ctrl-C again kills at once")
        self._stop_in_order(supervisor, hurry_at=2)
        trainer = supervisor.children["trainer"]
        if trainer.starts and trainer.exit_code == 0:
            return self._end("completed", None)
        if trainer.starts and trainer.exit_code not in (EX_STOPPED, None):
            how = describe_exit("the trainer", trainer.exit_code)
            self.display.note(f"{how} before it saved; the run will resume from its last checkpoint")
        return self._end("stopped", None)

    def _stop_in_order(self, supervisor: Supervisor, hurry_at: int) -> None:
        """Stop the services that have something to save first; keep the server for the last reading."""
        grace = self.config.services.stop_timeout_s
        for group in stop_groups(list(supervisor.children)):
            supervisor.stop(group, grace, hurry=lambda: self.signals.count >= hurry_at)
            if self.signals.count >= 2:
                self.display.note("killing everything")
                supervisor.kill_all()
                return

    def _fail(self, supervisor: Supervisor, failed: ProcessFailed) -> int:
        names = [name for name in supervisor.children if name != "valkey"]
        supervisor.stop(names, _FAIL_GRACE_S, hurry=lambda: self.signals.count >= 1)
        if failed.told:
            self.display.note(failed.reason)
        else:
            self.display.note(f"{failed.reason}; the end of its log:")
            for line in last_lines(failed.log, _LOG_LINES):
                self.display.note(f"    {line}")
        self.display.note(f"the whole log: {failed.log}")
        return self._end("failed", failed.reason)

    def _end(self, status: str, reason: str | None) -> int:
        """Read the ledger a last time, stop its server, then write and show the summary.

        A ledger that has gone back proves nothing, so the run has failed even if the trainer completed.
        """
        stats, report, went_back = self._last_reading()
        if went_back and status != "failed":
            status, reason = "failed", went_back
        if self._supervisor is not None:
            self._supervisor.stop(["valkey"], self.config.services.stop_timeout_s)
        summary = summaries.build(
            status=status,
            reason=reason,
            config=self.config,
            layout=self.layout,
            stats=stats,
            audit=report,
            wall_s=time.monotonic() - self._began,
            memory=self.memory.samples,
        )
        unwritten = None
        try:
            write_json(self.layout.summary, summary)
        except DiskFull as error:
            unwritten = error
        self.close()
        for line in summaries.lines(summary, self.layout):
            print(line, flush=True)
        for problem in (report.problems if report else [])[:10]:
            print(f"    {problem}", flush=True)
        print(self._next_step(status, report), flush=True)
        if unwritten is not None:
            print(f"headrace: {unwritten}", file=sys.stderr, flush=True)
            return EXIT_STOPPED if status == "stopped" else EXIT_FAILED
        if status == "completed":
            return EXIT_COMPLETED if report is not None and report.balanced else EXIT_FAILED
        return EXIT_FAILED if status == "failed" else EXIT_STOPPED

    def _next_step(self, status: str, report: RunAudit | None) -> str:
        if status == "completed" and report is None:
            return (
                f"next: the ledger could not be read at the end; headrace audit {self.config.name} tells more"
            )
        if status == "completed":
            return (
                f'next: AutoModelForCausalLM.from_pretrained("{self.layout.final}"); '
                f"headrace audit {self.config.name} lists the ledger"
            )
        if status == "failed":
            return f"next: correct what the log names, then continue with: {self.resume_command}"
        return f"next: continue with: {self.resume_command}"

    def _last_reading(self) -> tuple[Stats | None, RunAudit | None, str]:
        """Return the ledger's statistics, the audit, and why neither counts if the ledger went back.

        If the server is already gone, return the last statistics read and no audit.
        """
        seen = self._watch.stats if self._watch else None
        marks = self._watch.seen if self._watch else Marks()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._ends is None or self._supervisor is None:
            return None, None, ""
        valkey = self._supervisor.children.get("valkey")
        if valkey is not None and valkey.state is not ProcessState.READY:
            return seen, None, ""
        try:
            with connect(self._ends.redis_url, timeout_s=_LAST_READING_S) as client:
                ledger = SyncLedger(client, self.config.name, retry_s=1.0, seen=marks)
                seen = ledger.run(ops.stats())
                return seen, audit_run(self.layout, ledger, is_on=False), ""
        except LedgerWentBack as error:
            return seen, None, str(error)
        except (LedgerError, redis.RedisError, OSError) as error:
            if seen is not None:  # otherwise there never was a ledger
                self.display.note(f"the ledger could not be read at the end: {error}")
            return seen, None, ""


def endpoints_json(ends: Endpoints, pids: dict[str, int]) -> dict[str, Any]:
    """Content of `private/endpoints.json`: the addresses of a live run. Contains secrets."""
    return {
        "run": ends.run,
        "redis_url": ends.redis_url,
        "external_redis": ends.external_redis,
        "coordinator": ends.coordinator,
        "queue": ends.queue,
        "rollouters": [f"http://{ends.host}:{port}" for port in ends.rollouter_ports.values()],
        "metrics": {name: f"http://{address}/metrics" for name, address in ends.metrics.items()},
        "token": ends.token,
        "pids": pids,
    }


def phase_text(supervisor: Supervisor, progress: RunProgress) -> str:
    """What the run is waiting for, or that it is training."""
    pending = [c for c in supervisor.children.values() if c.state in _STARTING]
    if pending:
        stage = min(c.service.stage for c in pending)
        names = ", ".join(c.name for c in pending if c.service.stage == stage)
        verb = "restarting" if any(c.was_ready or c.exits for c in pending) else "starting"
        engines = "rollouter-" in names and verb == "starting"
        return f"{verb} {names}" + (" (loading the model)" if engines else "")
    if not any(name.startswith(ROLLOUTER) for name in supervisor.children):
        return "no rollouter: the trainer waits for `headrace scale`"
    if not progress.arrivals:
        return "waiting for the first update"
    return "training"
