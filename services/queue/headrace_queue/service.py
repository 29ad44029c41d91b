"""Run the queue service: its data, its loops, its API, and their clean shutdown."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import redis.asyncio

from headrace.config.redis_memory import needed_bytes
from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.connections.net import bound_socket
from headrace.data.rows import DataError
from headrace.ledger.client import AsyncLedger, LedgerError
from headrace.ledger.record import LedgerRecord
from headrace.service.http_server import HttpServer
from headrace.service.shell import stop_event
from headrace.system.endings import EX_CONFIG
from headrace_queue import startup
from headrace_queue.app import HANG_S, Service, create_app
from headrace_queue.feeder import Feeder, PromptSource
from headrace_queue.janitor import Janitor
from headrace_queue.keeper import Keeper
from headrace_queue.loops import Fatal, Loop, Pulse, run_loop
from headrace_queue.metrics import Memory, QueueCollector
from headrace_queue.validation import EvalFile, ValidationReporter

log = logging.getLogger("headrace_queue")

LOOP_RETRY_S = 0.0
"""No retries: the janitor must see every failed call, and the other loops retry within a second anyway."""
HTTP_RETRY_S = 1.0
DRAIN_S = 2
"""Seconds that open HTTP requests get at shutdown."""
LOOP_END_S = 1.0
"""Seconds that a loop gets at shutdown to finish its step. Cutting it short is harmless."""


def serve(config: RunConfig, args: argparse.Namespace) -> int:
    # Bind first, so that a taken port is reported before any other work.
    with bound_socket(args.host, args.port) as listener:
        asyncio.run(_serve(config, listener))
    # Skip the interpreter's teardown: the tokenizer's library may have imported torch, whose teardown takes
    # seconds on a busy machine. Everything that matters is in Redis or on disk already.
    logging.shutdown()
    os._exit(0)


def exit_code(error: Exception) -> int | None:
    match error:
        case Fatal():
            return error.code
        case DataError():
            return EX_CONFIG
    return None


async def _serve(config: RunConfig, listener: socket.socket) -> None:
    """Start, run the loops and the API, and end cleanly on SIGTERM or SIGINT."""
    url = variables.secret("HEADRACE_REDIS_URL") or config.redis.url
    if not url:
        raise startup.config_problem("no Redis is named: set HEADRACE_REDIS_URL, or redis.url in the file")
    client = await startup.connect(
        variables.with_redis_password(url), config.redis.connect_timeout_s, config.services.start_timeout_s
    )
    try:
        await startup.check_server(client, config)
        loops = await prepare(config, client)
        service = make_service(config, client, loops)
        await _run(service, loops, listener)
    finally:
        await client.aclose()


Loops = tuple[Feeder, Janitor, ValidationReporter, Keeper]


async def prepare(config: RunConfig, client: redis.asyncio.Redis) -> Loops:
    """Read and check the data, configure the run, and create the loops. Raises Fatal and DataError."""
    run_dir = Path(os.environ["HEADRACE_RUN_DIR"]) if os.environ.get("HEADRACE_RUN_DIR") else None
    try:
        eval_file = EvalFile(run_dir / "eval.jsonl" if run_dir else None)
    except OSError as error:
        raise startup.config_problem(f"{run_dir}: eval.jsonl cannot be read: {error.strerror}") from None
    data = startup.read_data(config)
    source = PromptSource(data.train.rows, data.train.tokens, data.order, config.reward.needs_prompt)
    held_out = data.held_out
    print_ = startup.fingerprint(config, data)
    record = LedgerRecord(run_dir)
    patient = AsyncLedger(
        client,
        config.name,
        retry_s=config.redis.connect_timeout_s,
        waits_when_full=True,
        seen=record.marks,
    )
    await startup.configure(patient, config, print_)
    await startup.load_validation(
        patient, held_out.rows, held_out.tokens, config.val.n, config.reward.needs_prompt
    )
    max_ready = config.data.max_ahead or 2 * config.rule.max_required
    sizes = {"rows": len(source.rows), "held_out": len(held_out.rows), "max_ready": max_ready}
    log.info("data is ready", extra=sizes)

    ledger = AsyncLedger(client, config.name, retry_s=LOOP_RETRY_S, seen=patient.seen)
    # With `resume: never` a trainer starts from scratch and needs every prompt again, so nothing is trimmed.
    checkpoints = run_dir / "checkpoints" if run_dir and config.trainer.resume != "never" else None
    return (
        Feeder(ledger, source, config.rollout.total_rollout_steps, max_ready),
        Janitor(ledger, config.ledger.lease_s, checkpoints),
        ValidationReporter(ledger, [row.data_source for row in held_out.rows], eval_file, config.val.n),
        Keeper(ledger, record),
    )


def make_service(config: RunConfig, client: redis.asyncio.Redis, loops: Loops) -> Service:
    """The API's view of the loops."""
    feeder, janitor, reporter, _ = loops
    pulses = {loop.name: Pulse() for loop in loops}

    def before_scrape(collector: QueueCollector) -> None:
        collector.expired_owners = janitor.expired_owners
        collector.scores = reporter.latest

    async def memory() -> Memory | None:
        try:
            info = await client.info("memory")
        except redis.ResponseError:  # a managed server may forbid it
            return None
        return Memory(int(info["used_memory"]), int(info.get("maxmemory", 0)), needed_bytes(config))

    return Service(
        run=config.name,
        ledger=AsyncLedger(client, config.name, retry_s=HTTP_RETRY_S),
        pulses=pulses,
        collector=QueueCollector(pulses),
        has_fed=lambda: feeder.has_fed,
        before_scrape=before_scrape,
        memory=memory,
        token=variables.token(),
        hang_s=HANG_S + 2 * config.redis.connect_timeout_s,
    )


async def _run(service: Service, loops: Sequence[Loop], listener: socket.socket) -> None:
    """Run until a signal arrives or a loop fails, then end everything within a few seconds."""
    stop = stop_event()
    server = HttpServer(create_app(service), DRAIN_S)
    listener.listen()  # before the log line, whose readers may connect at once
    host, port = listener.getsockname()[:2]
    log.info("listening", extra={"host": host, "port": port, "run": service.run})
    web = asyncio.create_task(server.serve(sockets=[listener]))
    tasks = [asyncio.create_task(run_loop(loop, service.pulses[loop.name], stop)) for loop in loops]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, web, *tasks], return_when=asyncio.FIRST_COMPLETED)
        log.info("ending", extra={"run": service.run})
    finally:
        stop.set()
        server.should_exit = True
        _, late = await asyncio.wait(tasks, timeout=LOOP_END_S)
        for task in late:
            task.cancel()
        ended = await asyncio.gather(*tasks, web, return_exceptions=True)
    await _report_the_last(loops)
    for error in ended:
        if isinstance(error, Exception):  # not CancelledError, from a step that was cut short
            raise error


async def _report_the_last(loops: Sequence[Loop]) -> None:
    """Report a run's last validation, which may have ended just before the service was stopped."""
    for loop in loops:
        if isinstance(loop, ValidationReporter):
            try:
                await asyncio.wait_for(loop.step(), LOOP_END_S)
            except (LedgerError, TimeoutError) as error:
                log.warning("the last validation was not reported", extra={"reason": str(error)})
