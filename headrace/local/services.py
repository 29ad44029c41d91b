"""The services of a run: their commands, start order and environment."""

from __future__ import annotations

import math
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.config.run import RunConfig
from headrace.connections import tls
from headrace.connections.net import LOOPBACK_INTERFACE, NCCL_INTERFACE, free_port, is_loopback, unix_address
from headrace.connections.variables import SECRET_FILES, without_secrets
from headrace.local import valkey_server
from headrace.local.processes import SupervisedService, command
from headrace.records.checkpoints import complete_checkpoints
from headrace.records.layout import RunLayout
from headrace.service.module_command import module_command

_PROBE_S = 0.5
_LOCK_WAIT_S = 5.0
REDIS_SOCKET, COORDINATOR_SOCKET = "valkey.sock", "coordinator.sock"


@dataclass(frozen=True)
class Endpoints:
    """Addresses of all services, and the secrets, which are written only to files in `private/`.

    The bundled server and the coordinator are sent secrets. They listen on Unix sockets in a folder that
    other users cannot enter, because another user could take over the TCP port of a crashed server.
    """

    run: str
    redis_url: str
    external_redis: bool
    redis_password: str = field(repr=False)
    """Password of the bundled server."""
    sockets: Path = Path()
    """Folder of the Unix sockets. Its path is short enough for the kernel's limit on socket paths."""
    host: str = valkey_server.HOST
    queue_port: int = 0
    coordinator_port: int = 0
    """0 if the coordinator listens on its Unix socket."""
    coordinator_metrics_port: int = 0
    rollouter_ports: Mapping[int, int] = field(default_factory=dict)
    """Port of each replica, by its number."""
    trainer_port: int = 0
    token: str = field(default="", repr=False)

    @property
    def queue(self) -> str:
        return f"http://{self.host}:{self.queue_port}"

    @property
    def redis_socket(self) -> Path:
        """Unix socket of the bundled server."""
        return self.sockets / REDIS_SOCKET

    @property
    def coordinator_socket(self) -> Path:
        return self.sockets / COORDINATOR_SOCKET

    @property
    def coordinator(self) -> str:
        if self.coordinator_port:
            return f"{self.host}:{self.coordinator_port}"
        return unix_address(self.coordinator_socket)

    @property
    def metrics(self) -> dict[str, str]:
        """host:port of each service's `/metrics`, by service name."""
        ports = {
            "trainer": self.trainer_port,
            "coordinator": self.coordinator_metrics_port,
            "queue": self.queue_port,
            **{rollouter_name(replica): port for replica, port in self.rollouter_ports.items()},
        }
        return {name: f"{self.host}:{port}" for name, port in ports.items()}

    def with_rollouter(self, replica: int) -> Endpoints:
        """A copy with a port for one more replica."""
        return replace(self, rollouter_ports={**self.rollouter_ports, replica: free_port(self.host)})

    def without_rollouter(self, replica: int) -> Endpoints:
        kept = {number: port for number, port in self.rollouter_ports.items() if number != replica}
        return replace(self, rollouter_ports=kept)


def choose_endpoints(config: RunConfig, sockets: Path, token: str, redis_password: str) -> Endpoints:
    """Choose free ports where the configuration names none, and Unix sockets in the folder `sockets`.

    The addresses stay the same when a service restarts.
    """
    host = config.services.host
    external = config.redis.url
    # TLS needs a port: the certificate proves who listens, and it names a host.
    coordinator_port = config.services.coordinator_port or (free_port(host) if tls.files() else 0)
    return Endpoints(
        run=config.name,
        redis_url=external or valkey_server.url_of(sockets / REDIS_SOCKET, redis_password),
        external_redis=external is not None,
        redis_password=redis_password,
        sockets=sockets,
        host=host,
        queue_port=config.services.queue_port or free_port(host),
        coordinator_port=coordinator_port,
        coordinator_metrics_port=free_port(host),
        rollouter_ports={replica: free_port(host) for replica in range(config.rollout.replicas)},
        trainer_port=free_port(host),
        token=token,
    )


ROLLOUTER = "rollouter-"
PROMETHEUS = "prometheus"


def rollouter_name(replica: int) -> str:
    return f"{ROLLOUTER}{replica}"


def part(name: str) -> str:
    """The kind of a service: `rollouter` for `rollouter-0`."""
    return "rollouter" if name.startswith(ROLLOUTER) else name


def service_names(config: RunConfig) -> list[str]:
    """Names of the services that the runner starts, in order."""
    rollouters = [rollouter_name(replica) for replica in range(config.rollout.replicas)]
    bundled = [] if config.redis.url else ["valkey"]
    return [*bundled, "coordinator", "queue", *rollouters, "trainer"]


def stop_groups(names: list[str]) -> list[list[str]]:
    """The order of a graceful stop. The bundled server is left out; it stops last.

    Rollouters park while the trainer saves: neither needs the other.
    """
    rollouters = [name for name in names if name.startswith(ROLLOUTER)]
    return [[*rollouters, "trainer"], ["coordinator"], ["queue"], [PROMETHEUS]]


def service_table(
    config: RunConfig, layout: RunLayout, ends: Endpoints, environ: Mapping[str, str] = os.environ
) -> list[SupervisedService]:
    """Every service of the run. All but the server start at once; each waits for what it needs."""
    env = _environment(layout, ends, environ)
    host, configured = ends.host, ("--config", str(layout.config))
    port = ends.coordinator_port
    coordinator = _listen(host, port) if port else ["--host", host, "--socket", str(ends.coordinator_socket)]
    services = [] if ends.external_redis else [_valkey(config, layout, ends, env)]
    services += [
        _module(
            layout,
            "coordinator",
            "headrace_coordinator",
            [
                *configured,
                *coordinator,
                *("--metrics-port", str(ends.coordinator_metrics_port)),
            ],
            env,
            ready=lambda: accepts((host, port) if port else ends.coordinator_socket),
        ),
        _module(
            layout,
            "queue",
            "headrace_queue",
            [*configured, *_listen(host, ends.queue_port)],
            env,
            ready=lambda: http_ok(f"{ends.queue}/readyz"),
        ),
    ]
    services += [rollouter(config, layout, ends, replica, environ) for replica in ends.rollouter_ports]
    services.append(
        _module(
            layout,
            "trainer",
            "headrace_trainer",
            [*configured, "--port", str(ends.trainer_port)],
            {**env, "OMP_NUM_THREADS": str(config.trainer.omp_threads)},
            completes=True,
            progress=lambda: [d.name for d in complete_checkpoints(layout.checkpoints)[-1:]],
        )
    )
    return services


def rollouter(
    config: RunConfig,
    layout: RunLayout,
    ends: Endpoints,
    replica: int,
    environ: Mapping[str, str] = os.environ,
    essential: bool = True,
) -> SupervisedService:
    """One rollouter replica. Its port must be in `ends`."""
    port = ends.rollouter_ports[replica]
    return _module(
        layout,
        rollouter_name(replica),
        "headrace_rollouter",
        ["--config", str(layout.config), *_listen(ends.host, port), "--replica", str(replica)],
        {
            **_environment(layout, ends, environ),
            "OMP_NUM_THREADS": str(config.rollout.engine.omp_threads),
            "VLLM_CPU_OMP_THREADS_BIND": environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        },
        # Not /readyz: that waits for weights from the trainer, which may be slow to start.
        ready=lambda: http_ok(f"http://{ends.host}:{port}/connectedz"),
        essential=essential,
    )


def _environment(layout: RunLayout, ends: Endpoints, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        **without_secrets(environ),  # drop those of another run, e.g. one in a cluster
        **{SECRET_FILES[name]: str(_secret_file(layout, name)) for name in _secrets(ends)},
        "HEADRACE_COORDINATOR": ends.coordinator,
        "HEADRACE_RUN_DIR": str(layout.root),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        # NCCL never chooses the loopback interface by itself.
        **({NCCL_INTERFACE: LOOPBACK_INTERFACE} if is_loopback(ends.host) else {}),
    }


def _secrets(ends: Endpoints) -> dict[str, str]:
    return {"HEADRACE_REDIS_URL": ends.redis_url, "HEADRACE_TOKEN": ends.token}


def _secret_file(layout: RunLayout, name: str) -> Path:
    return layout.private / name.removeprefix("HEADRACE_").lower()


def write_secrets(layout: RunLayout, ends: Endpoints) -> None:
    """Write the files from which the services read their secrets. Call before any service starts."""
    for name, value in _secrets(ends).items():
        file = _secret_file(layout, name)
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(value)


def _listen(host: str, port: int) -> list[str]:
    return ["--host", host, "--port", str(port)]


def _module(
    layout: RunLayout, name: str, package: str, words: Sequence[str], env: Mapping[str, str], **options: Any
) -> SupervisedService:
    """`python -m PACKAGE WORDS` as a service; `options` are fields of `SupervisedService`."""
    log = layout.log(name)
    return SupervisedService(
        name, log, command(module_command(package, *words), log), env, stage=1, **options
    )


def _valkey(
    config: RunConfig, layout: RunLayout, ends: Endpoints, env: Mapping[str, str]
) -> SupervisedService:
    log = layout.log("valkey")
    return SupervisedService(
        "valkey",
        log,
        lambda marked: valkey_server.launch(
            layout.redis,
            ends.redis_password,
            ends.redis_socket,
            log,
            marked,
            lock_wait_s=_LOCK_WAIT_S,
            max_memory_bytes=config.redis.max_memory_bytes,
        ),
        env,
        ready=lambda: valkey_server.answers(ends.redis_url),
        says=lambda: valkey_server.no_room(layout.redis, log) or "",
        stage=0,
    )


def accepts(where: Path | tuple[str, int]) -> bool:
    """Whether something accepts connections on a Unix socket, or on (host, port)."""
    try:
        if isinstance(where, Path):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_PROBE_S)
                probe.connect(str(where))
        else:
            socket.create_connection(where, timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def http_ok(url: str) -> bool:
    """Whether GET answers 200. Proxies in the environment are ignored."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PROBE_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False
    except Exception:  # http.client raises its own exceptions for a truncated answer
        return False


@dataclass(frozen=True)
class Plan:
    """The size of a run; `headrace run --dry-run` prints it."""

    updates: int
    syncs: int
    processes: list[str]


def plan(config: RunConfig) -> Plan:
    updates = config.rollout.total_rollout_steps / config.samples_per_update
    updates = math.floor(updates) if config.data.drop_last else math.ceil(updates)
    return Plan(
        updates=updates,
        syncs=math.ceil(updates / config.async_training.trigger_parameter_sync_step),
        processes=service_names(config),
    )
