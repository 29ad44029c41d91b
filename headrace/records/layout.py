"""The layout of a run's directory, its lock, and whether a new start continues the run.

    config.yaml          resolved configuration, secrets masked; what the services read
    metrics.jsonl        one row per local update (trainer)
    ledger.json          id of the run's ledger in Redis, and how far it had got (runner, queue, trainer)
    trained.jsonl        which step trained which samples (trainer); the audit compares the ledger with it
    samples/             trained samples, token by token, bounded in size (trainer)
    tensorboard/, wandb/ the rows of metrics.jsonl for other tools (trainer.logger)
    sync.jsonl           one row per committed sync round (trainer)
    eval.jsonl           one row per validated version and data source (queue)
    engine.json          the engine's name and version (rollouters)
    summary.json         the results, written when the runner ends
    logs/<service>.log   output of each service
    checkpoints/, final/ the trainer's checkpoints and the trained model
    redis/               the bundled server's append-only file
    prometheus/          configuration and data of the run's own Prometheus, if it has one
    private/             mode 0700: secrets (endpoints.json, redis_url, token), the lock, the configuration
                         as requested, the number of rollouters requested while the run is in progress

Files that its processes put under TMPDIR are elsewhere, and are removed with them (`headrace.local.scratch`).
Only one runner may use a directory. It holds a lock, which the guardian keeps until the run's last process is
gone. In a cluster there is no runner: the directory holds what the trainer writes, and its configuration.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import lifetime, loading
from headrace.config.run import RunConfig
from headrace.records import trained_log
from headrace.records.json_files import read_json

_TAKEOVER_S = 20.0
"""Seconds to wait for the processes of a killed runner to end."""


class RunInUseError(RuntimeError):
    """Another runner is using the directory."""


@dataclass(frozen=True)
class RunLayout:
    """Paths below one run's directory."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def trained(self) -> Path:
        return self.root / trained_log.FILE

    @property
    def sync(self) -> Path:
        return self.root / "sync.jsonl"

    @property
    def eval(self) -> Path:
        return self.root / "eval.jsonl"

    @property
    def engine(self) -> Path:
        return self.root / "engine.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def final(self) -> Path:
        return self.root / "final"

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def prometheus(self) -> Path:
        return self.root / "prometheus"

    @property
    def private(self) -> Path:
        return self.root / "private"

    @property
    def endpoints(self) -> Path:
        return self.private / "endpoints.json"

    @property
    def scale(self) -> Path:
        """What `headrace scale` requests of a running run: replicas by service."""
        return self.private / "scale.json"

    @property
    def requested(self) -> Path:
        """The configuration as requested, with `demo:` names not yet replaced by cache paths."""
        return self.private / "requested.yaml"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def create(self) -> None:
        """Create the missing directories."""
        for directory in (self.root, self.logs, self.checkpoints):
            directory.mkdir(parents=True, exist_ok=True)
        for directory in (self.private, self.redis):
            directory.mkdir(exist_ok=True, mode=0o700)
            directory.chmod(0o700)

    def lock(self, wait_s: float = _TAKEOVER_S) -> RunLock:
        """Lock the directory. Waits only while a killed runner's processes end. Raises RunInUseError."""
        self.create()
        path = self.private / "lock"
        deadline = time.monotonic() + wait_s
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                os.close(descriptor)
                if _alive(owner) or time.monotonic() > deadline:
                    raise RunInUseError(
                        f"{self.root}: in use by a run in progress (process {owner or 'unknown'}); "
                        "stop it, or choose another name with name=..."
                    ) from None
                time.sleep(0.05)
                continue
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return RunLock(descriptor)
            os.close(descriptor)  # the directory was moved aside in the meantime
            self.create()

    def in_use(self) -> bool:
        """Whether a runner, or a remaining process of one, holds the lock."""
        try:
            descriptor = os.open(self.private / "lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @property
    def in_cluster(self) -> bool:
        """Whether no runner has ever used the directory: the services run in a cluster, or it is a copy."""
        return not any(path.exists() for path in (self.private, self.redis, self.summary))

    def move_aside(self) -> Path:
        """Rename the directory to the first free `<name>.<n>` and return that."""
        number = 1
        while (target := self.root.with_name(f"{self.root.name}.{number}")).exists():
            number += 1
        os.rename(self.root, target)
        return target

    def read_summary(self) -> dict[str, Any] | None:
        return read_json(self.summary)

    def changed_keys(self, config: RunConfig) -> list[str]:
        """Changes of the configuration that a resumed run does not allow, one sentence per fixed key.

        Raises ConfigError when the stored configuration cannot be read.
        """
        if not self.requested.exists():
            return []
        stored = loading.load(self.requested)
        lines = []
        for key in lifetime.keys("run"):
            was, now = loading.value_at(stored, key), loading.value_at(config, key)
            if was != now:
                lines.append(
                    f"{self.root}: {key}: was {was!r} when the run was begun and is {now!r} now; "
                    "set it back, or start over with trainer.resume=never or another name"
                )
        return lines


@dataclass
class RunLock:
    """The lock on a directory, held while `descriptor` (or a copy of it) is open."""

    descriptor: int

    def release(self) -> None:
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
            self.descriptor = -1


def _alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def find_run(name: str, runs_dir: Path) -> RunLayout | None:
    """The run called `name`, or the one in the directory `name`; None if there is none."""
    for root in (runs_dir / name, Path(name)):
        if (root / "config.yaml").exists() or (root / "private").is_dir():
            return RunLayout(root.resolve())
    return None


def leave_config(config: RunConfig, read_from: Path, run_dir: Path) -> None:
    """Write the configuration into the run's directory, passwords masked, where no runner does it.

    The trainer calls this at startup. It replaces an earlier start's file, because an upgrade may have
    changed the configuration. `read_from`: the file that the trainer itself has read.
    """
    layout = RunLayout(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if layout.in_cluster and read_from.resolve() != layout.config.resolve():
        loading.write(config, layout.config)
