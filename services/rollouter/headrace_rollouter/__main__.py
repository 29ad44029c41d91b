"""`headrace-rollouter`: one vLLM engine; scale by running more of these."""

from __future__ import annotations

from headrace.early_stop import end_when_interrupted, end_when_told

end_when_told(0)  # before the other imports, which take seconds

# ruff: noqa: E402

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import redis
import uvicorn

from headrace import disk, environment, logs, telemetry, tls
from headrace.algorithms.checks import load_estimator
from headrace.comm import CommunicatorError, nccl_version
from headrace.config import RunConfig
from headrace.config_load import ConfigError, load
from headrace.coordinator_stream import TokenRefused
from headrace.cores import bind
from headrace.endings import EX_BEYOND_REPAIR, EX_CONFIG, EX_FAILED, EX_SOFTWARE, EX_UNAVAILABLE, say_why
from headrace.engines import ENGINES
from headrace.environments.loading import EnvironmentFailed
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerUnavailable, LedgerWentBack, LoginRefused, SyncLedger
from headrace.ledger_record import LedgerRecord
from headrace.metrics import rollouter as table
from headrace.model_files import eos_token_ids, vocabulary_size
from headrace.net import PortTaken, bound_socket
from headrace.redis_connect import connect, connect_async
from headrace.reward import RewardError, build_scorer
from headrace.sample_checks import SampleReader
from headrace.service.reconnecting_stream import CoordinatorRefused
from headrace.startup import until_configured
from headrace.telemetry import RolloutTelemetry
from headrace.trace import recorder
from headrace_rollouter import metrics
from headrace_rollouter.beats import Beats
from headrace_rollouter.engine import Engine, EngineFailed
from headrace_rollouter.environment_turns import environment_turns
from headrace_rollouter.health import build_app, missing
from headrace_rollouter.member import Expelled, Member
from headrace_rollouter.work import Worker

log = logging.getLogger("headrace.rollouter")

_END_S = 10.0
"""What is left of a failed rollouter may take to end, before the process ends without it."""
_UNDERSTOOD = (
    *(EngineFailed, Expelled, TokenRefused, CoordinatorRefused, tls.TlsError),
    *(LedgerUnavailable, LedgerWentBack, LoginRefused),
)


class PartFailed(RuntimeError):
    """A part of the rollouter ended with an error that is nobody's but its own."""


class Rollouter:
    def __init__(self, config: RunConfig, args: argparse.Namespace) -> None:
        self.config = config
        self.args = args
        # One start of one replica: identity for leases and ownership.
        self.incarnation = f"rollouter-{args.replica}-{uuid.uuid4().hex[:8]}"
        self.draining = False
        self.committed = -1
        """The policy version of a run that is on, followed until this rollouter has weights."""

    async def run(self) -> int:
        config = self.config
        await asyncio.to_thread(tls.wait, config.services.start_timeout_s)
        listener = bound_socket(self.args.host, self.args.port)  # a taken port shows before the engine loads
        nccl = nccl_version(config.sync.transport)  # so does a missing NCCL
        scorer = build_scorer(config)
        await scorer.start()  # and a reward that cannot be loaded
        client = connect_async(environment.redis_url())
        # An unreachable Redis shows before the engine loads.
        found = AsyncLedger(
            client, config.name, retry_s=0.0, seen=LedgerRecord(environment.run_dir_if_set()).marks
        )
        await until_configured(found, config)
        ledger = AsyncLedger(
            client,
            config.name,
            retry_s=config.redis.outage_timeout_s,
            waits_when_full=True,
            seen=found.seen,
        )
        beats = connect(environment.redis_url(), config.ledger.lease_s / 3)
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
        # What has been imported stays: without this each full collection walks all of it.
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
            environment.coordinator(),
            environment.token(),
            nccl,
            config.services.start_timeout_s,
        )
        app = build_app(self.engine, lambda: self.member.connected, self._missing)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                host=self.args.host,
                port=self.args.port,
                log_config=None,
                access_log=False,
                lifespan="off",  # there is nothing to begin or to end, and the end of its task is a traceback
            )
        )
        server.install_signal_handlers = lambda: None
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        parts = {
            "work": asyncio.create_task(self.worker.run()),
            "member": asyncio.create_task(self.member.run()),
            "engine": asyncio.create_task(self.engine.watch()),
            "beats": asyncio.create_task(self.beats.run()),
            "expired": asyncio.create_task(self._drop_what_expired(ledger)),
            "telemetry": asyncio.create_task(self._tell(ledger)),
            "http": asyncio.create_task(server._serve(sockets=[listener])),
        }
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({*parts.values(), stopped}, return_when=asyncio.FIRST_COMPLETED)
        failure: Exception | None = None
        if stop.is_set():
            await self._drain(ledger, parts)
        else:
            # Its lease must not go on because a part of it does not end, or does not say why it did.
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
        """Park interrupted groups, hand back the rest, leave, exit: inside the grace period."""
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
        """What to end with when a part has ended: its error, or the engine's, which may lie behind it."""
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
        """Metrics and telemetry of this process."""
        target = self.worker.target_sequences
        table.TARGET.set(target)
        period = min(1.0, self.config.ledger.lease_s / 5)
        started = time.monotonic()
        usage = metrics.Usage()
        while True:
            if self.worker.version < 0:
                stats = await ledger.run(ops.stats())
                # Of a run that has completed nobody sends weights any more.
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


_CODES: tuple[tuple[int, tuple[type[Exception], ...]], ...] = (
    (EX_UNAVAILABLE, (LedgerUnavailable,)),
    (EX_BEYOND_REPAIR, (LedgerWentBack,)),
    (EX_SOFTWARE, (EngineFailed, Expelled, PartFailed, PortTaken)),
    (EX_CONFIG, (ConfigError, RewardError, EnvironmentFailed, CommunicatorError, LoginRefused, ValueError)),
    (EX_CONFIG, (TokenRefused, CoordinatorRefused)),
)


def _end(error: Exception) -> int:
    """The last words; returns the exit code."""
    for code, kinds in _CODES:
        if isinstance(error, kinds):
            say_why("rollouter", error)
            return code
    log.error("the rollouter failed", exc_info=error)  # vLLM, which cannot load, say
    say_why("rollouter", f"{type(error).__name__}: {error}")
    return EX_FAILED


def _end_now(error: Exception) -> None:
    os._exit(_end(error))


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
    """The engine of `rollout.name`. Raises ValueError when its package does not import."""
    chosen: type[Engine] = ENGINES.get(config.rollout.name)
    return await chosen.start(config, stop_ids)


def _write_engine_file(engine: Engine, name: str) -> None:
    """Name and version as the engine itself reports them, for the run's summary."""
    directory = os.environ.get("HEADRACE_RUN_DIR")
    if directory:
        facts = {"name": name, "version": engine.version(), "package": ENGINES.origin(name)}
        file = Path(directory) / "engine.json"
        fresh = file.with_suffix(f".{os.getpid()}.tmp")
        with disk.writing(file):
            fresh.write_text(json.dumps(facts))
            fresh.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace-rollouter", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration file")
    parser.add_argument("--host", default="127.0.0.1", help="where health and metrics listen")
    parser.add_argument("--port", type=int, default=8100, help="port of health and metrics")
    parser.add_argument("--replica", default="0", help="name of this replica, for logs")
    args = parser.parse_args()
    logs.setup(f"rollouter-{args.replica}")
    end_when_interrupted(0)
    try:
        config = load(args.config)
        load_estimator(config)
        bind(config.rollout.cpus, "rollout.cpus")
        code = asyncio.run(Rollouter(config, args).run())
    except Exception as error:  # the last resort of a process
        code = _end(error)
    sys.exit(code)


if __name__ == "__main__":
    main()
