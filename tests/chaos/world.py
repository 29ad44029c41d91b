"""The run that the faults happen to: its processes, its server, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from headrace import redis_url
from headrace.ledger import ops
from headrace.ledger.audit import AuditReport, audit
from headrace.ledger.client import SyncLedger
from headrace.ledger.replies import Stats
from headrace.redis_connect import connect
from headrace.runner.layout import RunLayout, read_json, read_rows
from headrace.valkey_server import HOST, ValkeyServer, start_valkey
from tests.chaos.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = [sys.executable, "-m", "headrace.cli.main"]
NAME = "chaos"
LEASE_S = 3.0
ROLLOUTERS = 2
REPLACE_LIMIT_S = 60.0


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
    """Valkey behind a proxy, and `headrace run` on it."""

    def __init__(self, directory: Path, samples: int, seed: int, overrides: list[str]) -> None:
        self.directory = directory
        self.flags = directory / "flags"
        self.flags.mkdir(parents=True)
        self.layout = RunLayout(directory / NAME)
        self.rollouters = ROLLOUTERS
        self._password = secrets.token_urlsafe(16)
        self.valkey: ValkeyServer = start_valkey(directory / "valkey", self._password)
        self.proxy = Proxy(self.valkey.port)
        url = redis_url.build(HOST, self.proxy.port, self._password)
        words = [
            f"name={NAME}",
            f"runs_dir={directory}",
            f"seed={seed}",
            f"redis.url={url}",
            f"rollout.total_rollout_steps={samples}",
            f"rollout.replicas={ROLLOUTERS}",
            "rollout.test_freq=40",
            "actor.ppo_mini_batch_size=8",
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
        self.output = (directory / "output.log").open("wb")
        self.process = subprocess.Popen(
            [*HEADRACE, "run", "configs/demo.yaml", *words],
            cwd=ROOT,
            env={**os.environ, "HEADRACE_CHAOS_DIR": str(self.flags), "PYTHONPATH": python_path()},
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

    def trainer_ranks(self) -> list[psutil.Process]:
        pid = self.pids().get("trainer")
        if pid is None:
            return []
        try:
            children = psutil.Process(pid).children(recursive=True)
            return [
                c for c in children if "headrace_trainer.worker" in c.cmdline() and c.name() != "torchrun"
            ]
        except psutil.Error:
            return []

    def engine_core(self, rollouter: int) -> psutil.Process:
        """vLLM's own process of the rollouter with this process id."""
        children = psutil.Process(rollouter).children(recursive=True)
        (core,) = [c for c in children if "EngineCore" in " ".join(c.cmdline())]
        return core

    def stats(self) -> Stats:
        """Of the ledger, past the proxy."""
        with connect(self.valkey.url, timeout_s=10.0) as client:
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

    def close(self) -> None:
        if not self.ended:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30)
        self.output.close()
        self.proxy.close()
        self.valkey.stop()

    def said(self, lines: int = 40) -> str:
        """The end of what the runner printed."""
        return "\n".join((self.directory / "output.log").read_text(errors="replace").splitlines()[-lines:])
