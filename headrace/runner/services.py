"""The services of a run as commands: what is started, in which order, with which environment."""

from __future__ import annotations

import math
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace import redis_url, valkey_server
from headrace.config import RunConfig
from headrace.net import free_port
from headrace.runner.layout import RunLayout
from headrace.runner.processes import Service, command

_PROBE_S = 0.5
_LOCK_WAIT_S = 5.0


@dataclass(frozen=True)
class Endpoints:
    """Where everything listens, with the secrets: goes to `private/endpoints.json` only."""

    run: str
    redis_url: str
    external_redis: bool
    redis_port: int
    """Of the bundled server; 0 with an external one."""
    redis_password: str = field(repr=False)
    host: str = valkey_server.HOST
    queue_port: int = 0
    coordinator_port: int = 0
    coordinator_metrics_port: int = 0
    rendezvous_port: int = 0
    rollouter_ports: tuple[int, ...] = ()
    trainer_port: int = 0
    token: str = field(default="", repr=False)

    @property
    def queue(self) -> str:
        return f"http://{self.host}:{self.queue_port}"

    @property
    def coordinator(self) -> str:
        return f"{self.host}:{self.coordinator_port}"

    @property
    def rendezvous(self) -> str:
        return f"{self.host}:{self.rendezvous_port}"


def choose_endpoints(config: RunConfig, token: str, redis_password: str) -> Endpoints:
    """Free ports where the configuration names none; they stay the same over restarts of a service."""
    host = config.services.host
    external = config.redis.url
    redis_port = 0 if external else free_port(valkey_server.HOST)
    return Endpoints(
        run=config.name,
        redis_url=external or redis_url.build(valkey_server.HOST, redis_port, redis_password),
        external_redis=external is not None,
        redis_port=redis_port,
        redis_password=redis_password,
        host=host,
        queue_port=config.services.queue_port or free_port(host),
        coordinator_port=config.services.coordinator_port or free_port(host),
        coordinator_metrics_port=free_port(host),
        rendezvous_port=free_port(host),
        rollouter_ports=tuple(free_port(host) for _ in range(config.rollout.replicas)),
        trainer_port=free_port(host),
        token=token,
    )


def service_names(config: RunConfig) -> list[str]:
    """What the runner starts, in order."""
    rollouters = [f"rollouter-{i}" for i in range(config.rollout.replicas)]
    bundled = [] if config.redis.url else ["valkey"]
    return [*bundled, "rendezvous", "coordinator", "queue", *rollouters, "trainer"]


def stop_groups(names: list[str]) -> list[list[str]]:
    """The order of an orderly stop, without the bundled server, which is last of all."""
    rollouters = [name for name in names if name.startswith("rollouter-")]
    return [["trainer"], rollouters, ["queue"], ["coordinator"], ["rendezvous"]]


def service_table(
    config: RunConfig, layout: RunLayout, ends: Endpoints, environ: Mapping[str, str] = os.environ
) -> list[Service]:
    """Every service of the run. All start at once but for the server: each waits for what it needs."""
    common = {
        **environ,
        "HEADRACE_REDIS_URL": ends.redis_url,
        "HEADRACE_COORDINATOR": ends.coordinator,
        "HEADRACE_RDZV": ends.rendezvous,
        "HEADRACE_RUN_DIR": str(layout.root),
        "HEADRACE_TOKEN": ends.token,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    engine_env = {
        **common,
        "OMP_NUM_THREADS": str(config.rollout.engine.omp_threads),
        "VLLM_CPU_OMP_THREADS_BIND": environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }
    trainer_env = {**common, "OMP_NUM_THREADS": str(config.trainer.omp_threads)}

    def module(
        name: str,
        package: str,
        port: int,
        *extra: str,
        env: Mapping[str, str] = common,
        ready: Callable[[], bool] | None = None,
        stage: int,
        configured: bool = True,
    ) -> Service:
        argv = [sys.executable, "-m", package]
        argv += ["--config", str(layout.config)] if configured else []
        argv += ["--host", ends.host, "--port", str(port), *extra]
        return Service(name, layout.log(name), command(argv, layout.log(name)), env, ready, stage)

    services = [] if ends.external_redis else [_valkey(layout, ends, common)]
    services += [
        module(
            "rendezvous",
            "headrace.rendezvous",
            ends.rendezvous_port,
            ready=lambda: tcp_open(ends.host, ends.rendezvous_port),
            stage=1,
            configured=False,
        ),
        module(
            "coordinator",
            "headrace_coordinator",
            ends.coordinator_port,
            "--metrics-port",
            str(ends.coordinator_metrics_port),
            ready=lambda: tcp_open(ends.host, ends.coordinator_port),
            stage=1,
        ),
        module(
            "queue", "headrace_queue", ends.queue_port, ready=lambda: http_ok(f"{ends.queue}/readyz"), stage=1
        ),
    ]
    for replica, port in enumerate(ends.rollouter_ports):
        services.append(
            module(
                f"rollouter-{replica}",
                "headrace_rollouter",
                port,
                "--replica",
                str(replica),
                env=engine_env,
                ready=_readyz(ends.host, port),
                stage=1,
            )
        )
    argv = [sys.executable, "-m", "headrace_trainer", "--config", str(layout.config)]
    argv += ["--port", str(ends.trainer_port)]
    log = layout.log("trainer")
    services.append(
        Service(
            "trainer", log, command(argv, log), trainer_env, stage=1, completes=True, bound_to="rendezvous"
        )
    )
    return services


def _valkey(layout: RunLayout, ends: Endpoints, env: Mapping[str, str]) -> Service:
    log = layout.log("valkey")
    return Service(
        "valkey",
        log,
        lambda marked: valkey_server.launch(
            layout.redis, ends.redis_password, ends.redis_port, log, marked, lock_wait_s=_LOCK_WAIT_S
        ),
        env,
        ready=lambda: valkey_server.answers(ends.redis_url),
        stage=0,
    )


def _readyz(host: str, port: int) -> Callable[[], bool]:
    return lambda: http_ok(f"http://{host}:{port}/readyz")


def tcp_open(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S):
            return True
    except OSError:
        return False


def http_ok(url: str) -> bool:
    """Whether GET answers 200. Proxies of the environment are not used."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PROBE_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False
    except Exception:  # http.client's own exceptions, for an answer cut short
        return False


@dataclass(frozen=True)
class Plan:
    """What a run amounts to; `headrace run --dry-run` prints it."""

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
