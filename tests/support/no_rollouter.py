"""A run of real processes without vLLM: queue, coordinator, trainer, and a scripted rollouter if any."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config.redis_url import build
from headrace.connections.net import free_port
from headrace.connections.redis_client import connect
from headrace.ledger import audit
from tests.support import tiny_models
from tests.support.queue_process import TOKEN, Queue, write_tokenizer
from tests.waiting import until

READY = {
    "queue": '"event": "listening"',
    "coordinator": '"event": "serving"',
    "trainer": '"event": "lineage opened"',
    "rollouter": '"event": "engine loaded"',
}
"""What a service says once it has all that it needs of the others."""


MODULES = {"rollouter": "tests.support.scripted_rollouter"}


class Processes:
    """The services of one run, each with the environment of its pod; logs go on from start to start."""

    def __init__(self, folder: Path, redis_port: int) -> None:
        self.folder = folder
        self.redis_port = redis_port
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.started_at: dict[str, int] = {}
        """Length of the log at the last start."""
        self._ports = {name: free_port() for name in ("queue", "coordinator", "rollouter")}

    @classmethod
    def make(cls, folder: Path, server: Any, ranks: int = 1, **more: dict[str, Any]) -> Processes:
        """With the run's files; `more` settings, by section."""
        model = folder / "model"
        tiny_models.save("llama-tied", model)
        write_tokenizer(model)
        settings: dict[str, dict[str, Any]] = {
            "trainer": {"n_gpus_per_node": ranks, "device": "cpu"},
            "redis": {"outage_timeout_s": 60},
        }
        settings |= {name: settings.get(name, {}) | section for name, section in more.items()}
        Queue(folder / "run", server, model, settings).close()
        return cls(folder / "run", server.port)

    def start(self, name: str, password: str, front: Sequence[str] = ()) -> None:
        """`front`: words before the command. Returns at once."""
        ports = {key: f"127.0.0.1:{port}" for key, port in self._ports.items()}
        env = {
            **os.environ,
            "HEADRACE_REDIS_URL": f"redis://127.0.0.1:{self.redis_port}/0",
            "HEADRACE_REDIS_PASSWORD": password,
            "HEADRACE_TOKEN": TOKEN,
            "HEADRACE_RUN_DIR": str(self.folder),
            "HEADRACE_COORDINATOR": ports["coordinator"],
            "OMP_NUM_THREADS": "1",
        }
        module = MODULES.get(name, f"headrace_{name}")
        words = [sys.executable, "-m", module, "--config", str(self.folder / "run.yaml")]
        if name == "trainer":
            words += ["--heartbeat", str(self.heartbeat), "--stay"]
        else:
            words += ["--port", str(self._ports[name])]
        self.started_at[name] = len(self.log(name))
        with self._file(name).open("ab") as log:
            self.running[name] = subprocess.Popen([*front, *words], env=env, stdout=log, stderr=log)

    def up(self, password: str, *names: str) -> None:
        """Start them, and return once all are ready."""
        for name in names:
            self.start(name, password)
        for name in names:
            until(lambda name=name: self._is_ready(name), f"{name}; its log: {self._file(name)}")  # type: ignore[misc]

    def _is_ready(self, name: str) -> bool:
        fresh = self.log(name)[self.started_at[name] :]
        assert self.running[name].poll() is None, fresh
        return READY[name] in fresh

    @property
    def heartbeat(self) -> Path:
        return self.folder / "heartbeat"

    def alive(self, stale_s: float = 60.0) -> tuple[int, str]:
        """The liveness probe of the trainer: exit code and message."""
        words = [
            "-m",
            "headrace_trainer.distributed.heartbeat",
            str(self.heartbeat),
            "--stale-seconds",
            str(stale_s),
        ]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.strip()

    def end(self, name: str, timeout_s: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout_s)

    def exit_code(self, name: str, timeout_s: float = 60.0) -> int:
        """Of a service that ends by itself."""
        return self.running.pop(name).wait(timeout_s)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self._file(name).read_text() if self._file(name).exists() else ""

    def balanced(self, password: str) -> bool:
        """Whether the ledger's books agree."""
        with connect(build("127.0.0.1", self.redis_port, password)) as client:
            return audit(client, self.folder.name).balanced

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
