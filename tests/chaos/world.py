"""The run that the faults happen to: its processes, its server, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis

from headrace.config import redis_url
from headrace.config.loading import load
from headrace.connections.net import free_port, unix_path
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.audit import AuditReport, audit
from headrace.ledger.client import SyncLedger
from headrace.ledger.replies import Stats
from headrace.local.processes import SupervisedService
from headrace.local.services import Endpoints, service_table
from headrace.local.valkey_server import HOST, ValkeyServer, start_valkey
from headrace.records.json_files import read_json, read_rows
from headrace.records.layout import RunLayout
from headrace.system.endings import REASON_FILE
from tests.chaos.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = [sys.executable, "-m", "headrace.cli.main"]
NAME = "chaos"
LEASE_S = 3.0
ROLLOUTERS = 2
REPLACE_LIMIT_S = 60.0
UP_LIMIT_S = 180.0
BATCH = 8
APPEND_ONLY = "appendonlydir"
"""Where the Valkey server keeps what it must not lose."""


def python_path() -> str:
    """With the `sitecustomize` that strikes at named moments in front."""
    return os.pathsep.join([str(ROOT / "tests" / "chaos" / "inject"), os.environ.get("PYTHONPATH", "")])


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Stuck(RuntimeError):
    """The run does not recover from a fault."""


class World:
    """Valkey and the coordinator, each behind a proxy, and `headrace run` on them."""

    def __init__(self, directory: Path, samples: int, seed: int, overrides: list[str]) -> None:
        self.directory = directory
        self.flags = directory / "flags"
        self.flags.mkdir(parents=True)
        self.layout = RunLayout(directory / NAME)
        self.rollouters = ROLLOUTERS
        self.updates = samples // BATCH
        """About as many as the run has data for."""
        self._password = secrets.token_urlsafe(16)
        self.valkey: ValkeyServer = start_valkey(directory / "valkey", self._password)
        self.proxy = Proxy(self.valkey.port)
        url = redis_url.build(HOST, self.proxy.port, self._password)
        self.coordinator_proxy = Proxy(self._coordinator_socket)
        words = [
            f"name={NAME}",
            f"runs_dir={directory}",
            f"seed={seed}",
            f"redis.url={url}",
            f"rollout.total_rollout_steps={samples}",
            f"rollout.replicas={ROLLOUTERS}",
            "rollout.test_freq=40",
            f"actor.ppo_mini_batch_size={BATCH}",
            "trainer.save_freq=0",
            "trainer.save_interval_s=4",
            f"ledger.lease_s={LEASE_S}",
            "ledger.max_retries=6",
            "services.max_restarts=100000",
            "sync.pause_timeout_s=10",
            "sync.rendezvous_timeout_s=15",
            "sync.transfer_timeout_s=20",
            "val.max_delay_s=20",
            f"custom_reward_function.path={ROOT / 'tests' / 'chaos' / 'reward.py'}",
            *overrides,
        ]
        self._env = {
            **os.environ,
            "HEADRACE_CHAOS_DIR": str(self.flags),
            "HEADRACE_CHAOS_COORDINATOR": f"{HOST}:{self.coordinator_proxy.port}",
            "PYTHONPATH": python_path(),
        }
        self._extra: list[subprocess.Popen[bytes]] = []
        self.output = (directory / "output.log").open("wb")
        self.process = subprocess.Popen(
            [*HEADRACE, "run", "configs/demo.yaml", *words],
            cwd=ROOT,
            env=self._env,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    # -- what can be seen ------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Rows of the run log so far, steps that were trained again included."""
        try:
            return self.layout.metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def pids(self) -> dict[str, int]:
        """Services that the runner says are alive, and that are."""
        found: dict[str, int] = (read_json(self.layout.endpoints) or {}).get("pids", {})
        return {name: pid for name, pid in found.items() if is_alive(pid)}

    def trainer_processes(self) -> list[psutil.Process]:
        """torchrun's agent and the ranks."""
        pid = self.pids().get("trainer")
        if pid is None:
            return []
        try:
            children = psutil.Process(pid).children(recursive=True)
            return [c for c in children if "headrace_trainer.worker" in c.cmdline()]
        except psutil.Error:
            return []

    def trainer_ranks(self) -> list[psutil.Process]:
        agent = "headrace_trainer.launch.node_agent"  # which has the ranks' module in its arguments, too
        with contextlib.suppress(psutil.Error):
            return [c for c in self.trainer_processes() if agent not in c.cmdline()]
        return []

    def engine_core(self, rollouter: int) -> psutil.Process:
        """vLLM's own process of the rollouter with this process id."""
        children = psutil.Process(rollouter).children(recursive=True)
        (core,) = [c for c in children if "EngineCore" in " ".join(c.cmdline())]
        return core

    @property
    def redis(self) -> redis.Redis:
        """Past the proxy. To be closed."""
        return connect(self.valkey.url, timeout_s=10.0)

    def stats(self) -> Stats:
        """Of the ledger, past the proxy."""
        with self.redis as client:
            return SyncLedger(client, NAME).run(ops.stats())

    def audit(self) -> AuditReport:
        with connect(self.valkey.url, timeout_s=60.0) as client:
            return audit(client, NAME)

    def summary(self) -> dict[str, Any]:
        return self.layout.read_summary() or {}

    def scores(self) -> list[dict[str, Any]]:
        return read_rows(self.layout.eval)

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], object], limit_s: float) -> float:
        """Seconds until `condition` held. Raises Stuck; ends early when the run has ended."""
        began = time.monotonic()
        while not self.ended and not condition():
            if time.monotonic() - began > limit_s:
                raise Stuck(f"{what} did not come within {limit_s:g} s")
            time.sleep(0.1)  # poll interval
        return time.monotonic() - began

    def _coordinator_socket(self) -> Path | None:
        """Of the runner's own coordinator: another at each start of the runner."""
        return unix_path((read_json(self.layout.endpoints) or {}).get("coordinator", ""))

    def is_well(self) -> bool:
        """Every service is up, and exactly the rollouters that are asked for take part."""
        pids = self.pids()
        if not {"coordinator", "queue", "trainer"} <= pids.keys():
            return False
        up = {name for name in pids if name.startswith("rollouter-")}
        members = {member.rsplit("-", 1)[0] for member in self.stats().members}
        return up == members and len(up) == self.rollouters

    def replaced(self, name: str, pid: int) -> None:
        """Wait until the service runs as another process: the runner has seen that it died."""
        self.wait(f"another process for {name}", lambda: self.pids().get(name, pid) != pid, REPLACE_LIMIT_S)

    def members_of(self, name: str) -> set[str]:
        """Incarnations of a rollouter that the ledger knows."""
        return {member for member in self.stats().members if member.startswith(f"{name}-")}

    # -- acts ------------------------------------------------------------------------------------

    def signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it died by itself a moment ago: a fault all the same
            os.kill(pid, number)

    def restart_valkey(self) -> None:
        self.valkey.kill()
        self.valkey = start_valkey(self.directory / "valkey", self._password, self.valkey.port)

    def scale(self, rollouters: int) -> None:
        self.rollouters = rollouters
        subprocess.run(
            [*HEADRACE, "scale", str(self.layout.root), f"rollouter={rollouters}"],
            cwd=ROOT,
            check=True,
            timeout=60,
            capture_output=True,
        )

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*HEADRACE, *words], cwd=ROOT, check=False, timeout=120, capture_output=True, text=True
        )

    def remember_redis(self) -> None:
        """Keep the append-only file as it is now, for `restore_redis`."""
        self.valkey.kill()
        older = self.directory / "older"
        shutil.rmtree(older, ignore_errors=True)
        shutil.copytree(self.directory / "valkey" / APPEND_ONLY, older)
        self.restart_valkey()

    def restore_redis(self) -> None:
        """Everything that was acknowledged since `remember_redis` is lost."""
        self.valkey.kill()
        shutil.rmtree(self.directory / "valkey" / APPEND_ONLY)
        shutil.copytree(self.directory / "older", self.directory / "valkey" / APPEND_ONLY)
        self.restart_valkey()

    def spawn(self, *words: str) -> subprocess.Popen[bytes]:
        """`python -m WORDS` among the run's services, with their environment."""
        with self._log(words[0]).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env=self._service("queue").env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._extra.append(process)
        return process

    def lines(self, module: str) -> list[str]:
        """What processes of `spawn` have printed, so far."""
        return self._log(module).read_text(errors="replace").splitlines()

    def _log(self, module: str) -> Path:
        return self.directory / f"{module}.log"

    def double(self, name: str) -> subprocess.Popen[bytes]:
        """A second process of a service, on ports of its own, that the runner knows nothing of.

        Returns once it is up or has ended.
        """
        service = self._service(name)
        reason = self.directory / f"second-{name}.reason"
        process = service.start({**service.env, REASON_FILE: str(reason)})
        self._extra.append(process)
        ready = service.ready or (lambda: True)
        self.wait(f"the second {name} to be up", lambda: process.poll() is not None or ready(), UP_LIMIT_S)
        return process

    def _service(self, name: str) -> SupervisedService:
        """As the runner would start it, but for the ports."""
        told = read_json(self.layout.endpoints) or {}
        replicas = [int(n.removeprefix("rollouter-")) for n in self.pids() if n.startswith("rollouter-")]
        ends = Endpoints(
            run=NAME,
            redis_url=told["redis_url"],
            external_redis=True,
            redis_password="",
            queue_port=free_port(),
            coordinator_port=free_port(),
            coordinator_metrics_port=free_port(),
            rollouter_ports={number: free_port() for number in replicas},
            trainer_port=free_port(),
            token=told["token"],
        )
        table = service_table(load(self.layout.config), self.layout, ends, self._env)
        return next(service for service in table if service.name == name)

    def close(self) -> None:
        for process in self._extra:
            if process.poll() is None:
                process.kill()
                process.wait(30)
        if not self.ended:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30)
        self.output.close()
        self.proxy.close()
        self.coordinator_proxy.close()
        self.valkey.stop()

    def said(self, lines: int = 40) -> str:
        """The end of what the runner printed."""
        return "\n".join((self.directory / "output.log").read_text(errors="replace").splitlines()[-lines:])
