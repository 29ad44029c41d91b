"""The life of the coordinator: runs its server, the driver of its rounds and side tasks, and ends them."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.config.loading import ConfigError, load
from headrace.config.run import RunConfig
from headrace.connections import tls, variables
from headrace.connections.net import PortTaken, claimed_path, unix_address
from headrace.connections.redis_client import connect_async
from headrace.ledger.client import AsyncLedger
from headrace.ledger.record import LedgerRecord
from headrace.service import coordinator_stream
from headrace.service.metrics_server import serve_metrics
from headrace.service.shell import stop_event
from headrace.service.startup import until_configured
from headrace.system.endings import EX_FAILED
from headrace.v1 import sync_pb2, sync_pb2_grpc
from headrace_coordinator.advice import Adviser
from headrace_coordinator.ledger_watch import watch_ledger
from headrace_coordinator.rounds.driver import Driver
from headrace_coordinator.rounds.roster import CoordinatorSuperseded
from headrace_coordinator.servicer import CoordinatorServicer, TokenInterceptor
from headrace_coordinator.tuning import ConfigWatch, check_memory, stamp_of

if TYPE_CHECKING:
    from headrace_coordinator.kube.agent import Agent

log = logging.getLogger("headrace.coordinator")

_AGAIN_S = 5.0


def serve(_: RunConfig, args: argparse.Namespace) -> int:
    return asyncio.run(_serve(args))


def exit_code(error: Exception) -> int | None:
    return EX_FAILED if isinstance(error, CoordinatorSuperseded) else None


async def _serve(args: argparse.Namespace) -> int:
    token = variables.token_to_listen(args.host)
    seen = stamp_of(args.config)  # before it is read, so once more: what follows may take minutes
    config = load(args.config)
    client = connect_async(variables.redis_url(), config.redis.connect_timeout_s)
    found = AsyncLedger(client, config.name, retry_s=0.0, seen=LedgerRecord(variables.run_dir_if_set()).marks)
    await until_configured(found, config)
    await check_memory(config, client)
    ledger = AsyncLedger(client, config.name, retry_s=config.redis.outage_timeout_s, seen=found.seen)
    driver = Driver(config, ledger)
    adviser = Adviser(config, driver.ledger, driver.notices.listen())
    followers = [adviser.follow]
    beside: dict[str, Callable[[], Awaitable[None]]] = {"advice": adviser.run}
    if config.kubernetes.enable:
        agent = _cluster_agent(config, driver)
        followers.append(agent.follow)
        beside["kubernetes"] = agent.run
    beside["tuning"] = ConfigWatch(args.config, config, seen, driver, client, followers).run
    server = grpc.aio.server(interceptors=[TokenInterceptor(token)], options=coordinator_stream.SERVER)
    servicer = CoordinatorServicer(driver)
    sync_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    name = sync_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
    reflection.enable_server_reflection(
        (name, reflection.SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name), server
    )
    where = unix_address(args.socket) if args.socket else f"{args.host}:{args.port}"
    if args.socket:
        claimed_path(args.socket)  # until this process ends
    try:
        port = tls.listen(server, where)
    except RuntimeError as error:
        raise PortTaken(f"cannot listen on {where}: {error}") from None
    await driver.recover()  # with the port in hand: a second start by mistake must not fence the first
    serve_metrics(args.host, args.metrics_port)
    await server.start()
    await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    at = {"socket": str(args.socket)} if args.socket else {"host": args.host, "port": port}
    log.info("serving", extra=at)
    stop = stop_event()
    work = asyncio.create_task(driver.run())
    watch = asyncio.create_task(watch_ledger(ledger))
    others = [asyncio.create_task(_for_ever(name, part)) for name, part in beside.items()]
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({work, watch, stopped}, return_when=asyncio.FIRST_COMPLETED)
    servicer.close()
    await server.stop(grace=1.0)
    # Neither returns normally: a finished task has failed, and the process restarts. One cause may end both.
    failures = [failure for task in (work, watch) if task.done() and (failure := task.exception())]
    if failures:
        raise failures[0]
    for task in (work, watch, *others):
        task.cancel()
    return 0


async def _for_ever(name: str, part: Callable[[], Awaitable[None]]) -> None:
    """Run a part that the run does not depend on. Its failures are logged, and it is restarted."""
    while True:
        try:
            await part()
        except Exception:  # a fault of the cluster, or a bug, must not end the coordinator
            log.exception("part failed", extra={"part": name})
        await asyncio.sleep(_AGAIN_S)


def _cluster_agent(config: RunConfig, driver: Driver) -> Agent:
    """Build the cluster agent. Raises ConfigError when it cannot work here."""
    if importlib.util.find_spec("kubernetes") is None:
        raise ConfigError(
            ["kubernetes.enable: the client is missing; install headrace[kubernetes], or leave this out"]
        )
    from headrace_coordinator.kube.agent import Agent
    from headrace_coordinator.kube.api import Cluster, ClusterError

    try:
        return Agent(config, driver, Cluster(config.kubernetes))
    except ClusterError as error:
        raise ConfigError(
            [f"kubernetes.enable: no cluster is to be found ({error}); mount the service account's token"]
        ) from None
