"""The life of a rollouter: starts its parts and shuts them down in order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import redis

from headrace.config.algorithm_checks import load_estimator
from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.connections.net import bound_socket
from headrace.connections.redis_client import connect, connect_async
from headrace.connections.tls import TlsError
from headrace.environments.loading import EnvironmentFailed
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerUnavailable, LedgerWentBack, LoginRefused, SyncLedger
from headrace.ledger.record import LedgerRecord
from headrace.metrics import rollouter as table
from headrace.models.files import eos_token_ids, vocabulary_size
from headrace.plugins.engines import ENGINES
from headrace.rewards import RewardError, build_scorer
from headrace.service import telemetry
from headrace.service.coordinator_stream import CoordinatorRefused, TokenRefused
from headrace.service.http_server import HttpServer
from headrace.service.shell import last_words, stop_event
from headrace.service.startup import until_configured
from headrace.service.telemetry import RolloutTelemetry
from headrace.system import disk
from headrace.system.endings import EX_CONFIG, EX_SOFTWARE
from headrace.traces.service_recorder import recorder
from headrace.weights.transports import CommunicatorError, library_version
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter import metrics
from headrace_rollouter.generation.environment_turns import environment_turns
from headrace_rollouter.generation.work import Worker
from headrace_rollouter.inference.engine import Engine, EngineFailed
from headrace_rollouter.membership.beats import Beats
from headrace_rollouter.membership.health import build_app, missing
from headrace_rollouter.membership.member import Expelled, Member

log = logging.getLogger("headrace.rollouter")

_END_S = 10.0
"""Longest orderly shutdown of a failed rollouter, in seconds. The process exits hard after that."""
_UNDERSTOOD = (
    *(EngineFailed, Expelled, TokenRefused, CoordinatorRefused, TlsError),
    *(LedgerUnavailable, LedgerWentBack, LoginRefused),
)


class PartFailed(RuntimeError):
    """A part of the rollouter failed with an unexpected error."""


class Rollouter:
    def __init__(self, config: RunConfig, args: argparse.Namespace) -> None:
        self.config = config
        self.args = args
        # One start of one replica: identity for leases and ownership.
        self.incarnation = f"rollouter-{args.replica}-{uuid.uuid4().hex[:8]}"
        self.draining = False
        self.committed = -1
        """The run's committed policy version, tracked until this rollouter has weights. -1: none."""

    async def run(self) -> int:
        config = self.config
        # Loading the engine is slow. Whatever can fail early does so before it: a taken port, a missing
        # transport library, a reward that does not load, an unreachable Redis.
        listener = bound_socket(self.args.host, self.args.port)
        nccl = library_version(config.sync.transport)
        scorer = build_scorer(config)
        await scorer.start()
        client = connect_async(variables.redis_url())
        found = AsyncLedger(
            client, config.name, retry_s=0.0, seen=LedgerRecord(variables.run_dir_if_set()).marks
        )
        await until_configured(found, config)
        ledger = AsyncLedger(
            client,
            config.name,
            retry_s=config.redis.outage_timeout_s,
            waits_when_full=True,
            seen=found.seen,
        )
        beats = connect(variables.redis_url(), config.ledger.lease_s / 3)
        self.beats = Beats(
            SyncLedger(beats, config.name, retry_s=0.0, seen=found.seen),
            self.incarnation,
            config.ledger.lease_s,
            config.redis.outage_timeout_s,
        )
        self.beats.start()
        stop_ids = eos_token_ids(Path(config.model.path))
        decode = _decoder(config, stop_ids)
        vocabulary = vocabulary_size(Path(config.model.path))
        reader = SampleReader(config, vocabulary)
        turns = environment_turns(config, stop_ids, vocabulary)
        began = time.monotonic()
        self.engine = await start_engine(config, stop_ids)
        log.info(
            "engine loaded",
            extra={
                "seconds": round(time.monotonic() - began, 1),
                "engine": config.rollout.name,
                "package": ENGINES.origin(config.rollout.name),
            },
        )
        # Imported modules live as long as the process. Frozen, they are not walked by every full collection.
        gc.collect()
        gc.freeze()
        _write_engine_file(self.engine, config.rollout.name)
        trace = self.engine.trace = recorder(config, f"rollouter-{self.args.replica}")
        self.worker = Worker(
            config, ledger, self.engine, scorer, decode, self.incarnation, reader, trace, turns
        )
        self.member = Member(
            config,
            self.engine,
            self.worker,
            self.incarnation,
            variables.coordinator(),
            variables.token(),
            nccl,
            config.services.start_timeout_s,
        )
        app = build_app(self.engine, lambda: self.member.connected, self._missing)
        server = HttpServer(app)
        stop = stop_event()
        parts = {
            "work": asyncio.create_task(self.worker.run()),
            "member": asyncio.create_task(self.member.run()),
            "engine": asyncio.create_task(self.engine.watch()),
            "beats": asyncio.create_task(self.beats.run()),
            "expired": asyncio.create_task(self._drop_what_expired(ledger)),
            "telemetry": asyncio.create_task(self._tell(ledger)),
            "http": asyncio.create_task(server.serve(sockets=[listener])),
        }
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({*parts.values(), stopped}, return_when=asyncio.FIRST_COMPLETED)
        failure: Exception | None = None
        if stop.is_set():
            await self._drain(ledger, parts)
        else:
            # Stop the beats first: a part that hangs while shutting down must not keep the lease alive.
            await asyncio.to_thread(self.beats.stop)
            failure = await self._failure(parts)
            last_resort = threading.Timer(_END_S, _end_now, (failure,))
            last_resort.daemon = True
            last_resort.start()
        server.should_exit = True
        for task in parts.values():
            task.cancel()
        await asyncio.gather(*parts.values(), return_exceptions=True)
        await asyncio.to_thread(self.beats.stop)
        await scorer.close()
        self.engine.shutdown()
        if failure is not None:
            raise failure
        return 0

    async def _drain(self, ledger: AsyncLedger, parts: dict[str, asyncio.Task[Any]]) -> None:
        """Park interrupted groups, hand back the rest and leave, all within the grace period."""
        self.draining = True
        log.info("draining", extra={"running": self.worker.running})
        budget_s = self.config.services.stop_timeout_s
        ends = time.monotonic() + budget_s
        try:
            await asyncio.wait_for(self.worker.drain(), budget_s * 0.7)
        except TimeoutError:
            log.warning(
                "drain unfinished; the lease will return the rest", extra={"left": self.worker.running}
            )
        await asyncio.to_thread(self.beats.stop)
        await self.member.leave()
        try:
            async with asyncio.timeout(max(1.0, ends - time.monotonic())):
                await ledger.run(ops.expire(self.incarnation, "left", left=True))
                with contextlib.suppress(redis.RedisError):
                    await ledger.redis.hdel(telemetry.telemetry_key(self.config.name), self.incarnation)
        except (TimeoutError, LedgerUnavailable):
            log.warning("left unheard, Redis is out of reach; the lease will tell")

    async def _failure(self, parts: dict[str, asyncio.Task[Any]]) -> Exception:
        """The error to exit with after a part has ended: its own, or the engine's that may have caused it."""
        failed = [(name, task.exception()) for name, task in parts.items() if task.done()]
        for _, error in failed:
            if isinstance(error, _UNDERSTOOD):
                return error
        try:
            await self.engine.check()
        except EngineFailed as dead:
            return dead
        name, error = failed[0]
        log.error("part failed", exc_info=error, extra={"part": name})
        return PartFailed(f"its part {name!r} failed: {error!r}")

    def _missing(self) -> str:
        return missing(self.draining, self.member.connected, self.worker.version, self.committed)

    async def _drop_what_expired(self, ledger: AsyncLedger) -> None:
        while True:
            await self.beats.expired.wait()
            self.beats.expired.clear()
            while not await self.member.expired(ledger):
                pass  # each try waits for the ledger

    async def _tell(self, ledger: AsyncLedger) -> None:
        """Publish this process's metrics and telemetry, forever."""
        target = self.worker.target_sequences
        table.TARGET.set(target)
        period = min(1.0, self.config.ledger.lease_s / 5)
        started = time.monotonic()
        usage = metrics.Usage()
        while True:
            if self.worker.version < 0:
                stats = await ledger.run(ops.stats())
                # Once the run has completed, nobody sends weights any more.
                self.committed = -1 if stats.completed else stats.version
            active, window = self.engine.active_s, time.monotonic() - started
            usage.seen(active, window, self.engine.generated_tokens, self.worker.version)
            table.SERVING.set(self.worker.serving.is_set())
            table.RUNNING.set(self.engine.running)
            table.MEMORY.set(ledger.waits_for_memory)
            now = _telemetry(self.engine, self.worker, active, window)
            with contextlib.suppress(redis.RedisError):  # nothing depends on it
                await telemetry.tell(ledger.redis, self.config.name, self.incarnation, now)
            await asyncio.sleep(period)


def _telemetry(engine: Engine, worker: Worker, active_s: float, window_s: float) -> RolloutTelemetry:
    return RolloutTelemetry(
        active_s=active_s,
        window_s=window_s,
        running=engine.running,
        target=worker.target_sequences,
        tokens=engine.generated_tokens,
        samples=worker.samples_finished,
        version=worker.version,
        sequence_s=engine.sequence_s(),
        tokens_in_flight=engine.tokens_in_flight(),
    )


def serve(config: RunConfig, args: argparse.Namespace) -> int:
    load_estimator(config)
    return asyncio.run(Rollouter(config, args).run())


def exit_code(error: Exception) -> int | None:
    match error:
        case EngineFailed() | Expelled() | PartFailed():
            return EX_SOFTWARE
        case RewardError() | EnvironmentFailed() | CommunicatorError() | ValueError():
            return EX_CONFIG
    return None


def _end_now(error: Exception) -> None:
    os._exit(last_words("rollouter", error, exit_code))


def _decoder(config: RunConfig, stop_ids: list[int]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    ends = set(stop_ids)

    def decode(ids: list[int]) -> str:
        kept = ids[:-1] if ids and ids[-1] in ends else ids
        return str(tokenizer.decode(kept, skip_special_tokens=True))

    return decode


async def start_engine(config: RunConfig, stop_ids: list[int]) -> Engine:
    """Start the engine named by `rollout.name`. Raises ValueError when its package does not import."""
    chosen: type[Engine] = ENGINES.get(config.rollout.name)
    return await chosen.start(config, stop_ids)


def _write_engine_file(engine: Engine, name: str) -> None:
    """Record the engine's name and self-reported version for the run's summary."""
    directory = os.environ.get("HEADRACE_RUN_DIR")
    if directory:
        facts = {"name": name, "version": engine.version(), "package": ENGINES.origin(name)}
        file = Path(directory) / "engine.json"
        fresh = file.with_suffix(f".{os.getpid()}.tmp")
        with disk.writing(file):
            fresh.write_text(json.dumps(facts))
            fresh.replace(file)
