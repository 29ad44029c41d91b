"""`headrace run` as a process: start it, wait for what it does, read what it wrote."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.ledger.replies import Stats

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = [sys.executable, "-P", "-m", "headrace.cli.main"]
"""As the script `headrace`, which does not put the working directory on the path."""
UPDATES = 8
SAMPLES_PER_UPDATE = 16


@dataclass
class Run:
    directory: Path
    overrides: list[str]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())  # type: ignore[no-any-return]

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        file = self.directory / name
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]

    @property
    def endpoints(self) -> dict[str, Any]:
        return json.loads((self.directory / "private" / "endpoints.json").read_text())  # type: ignore[no-any-return]

    def pid(self, service: str) -> int | None:
        """Process id of a service that runs, as the runner last wrote it down."""
        try:
            found: int | None = self.endpoints["pids"].get(service)
        except FileNotFoundError:
            return None
        return found

    def stats(self) -> Stats:
        """What the ledger says now."""
        ends = self.endpoints
        with connect(ends["redis_url"], timeout_s=5.0) as client:
            return SyncLedger(client, ends["run"]).run(ops.stats())

    def log(self, service: str) -> str:
        file = self.directory / "logs" / f"{service}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self, *more: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*HEADRACE, "run", str(ROOT / "configs" / "demo.yaml"), *self.overrides, *more],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*HEADRACE, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )


def make_run(base: Path, name: str, *overrides: str) -> Run:
    return Run(
        base / name,
        [
            f"name={name}",
            f"runs_dir={base}",
            f"rollout.total_rollout_steps={UPDATES * SAMPLES_PER_UPDATE}",
            "rollout.test_freq=2",
            "trainer.save_freq=1",
            *overrides,
        ],
    )


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """For a run's TMPDIR: empty, and with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hr", dir="/tmp") as folder:
        yield Path(folder)


def wait_for(
    what: str, condition: Callable[[], object], process: subprocess.Popen[str], seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise AssertionError(
                f"the run ended while waiting for {what}:\n{process.communicate()[0][-4000:]}"
            )
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.1)  # poll interval


def processes_of(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(directory) in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found
