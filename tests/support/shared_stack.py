"""One Valkey and one vLLM engine for many short runs: each run has its own coordinator, queue and trainer.

Everything is the real thing, but in this process: services on an event loop of a thread, the trainer, a
rank of one under FSDP2, in the caller's. Starting an engine takes most of the time of a short run.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import grpc

from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect, connect_async
from headrace.ledger import keys, ops
from headrace.ledger.client import AsyncLedger, SyncLedger
from headrace.ledger.replies import Stats
from headrace.local.valkey_server import start_valkey
from headrace.models.files import eos_token_ids, vocabulary_size
from headrace.records.audit import RunAudit, audit_run
from headrace.records.layout import RunLayout
from headrace.rewards import build_scorer
from headrace.service import coordinator_stream
from headrace.service.telemetry import encode, telemetry_key
from headrace.traces.service_recorder import recorder
from headrace.v1 import sync_pb2_grpc
from headrace.wire.sample_checks import SampleReader
from headrace_coordinator.rounds.driver import Driver
from headrace_coordinator.servicer import CoordinatorServicer, TokenInterceptor
from headrace_queue.loops import Pulse, run_loop
from headrace_queue.service import _report_the_last, prepare
from headrace_rollouter.generation.environment_turns import environment_turns
from headrace_rollouter.generation.work import Worker
from headrace_rollouter.inference.engine import Engine
from headrace_rollouter.membership.member import Member
from headrace_rollouter.service import _decoder, _telemetry
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.loop import Trainer

T = TypeVar("T")
TOKEN = "a-token"


@dataclass
class Finished:
    """What a run left."""

    code: int
    directory: Path
    stats: Stats
    audit: RunAudit
    records: dict[str, dict[str, str]]
    """What the ledger remembers of each sample, without its bytes."""

    @property
    def balanced(self) -> bool:
        return self.audit.balanced

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


def _texts(record: dict[bytes, bytes]) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in record.items() if k not in (b"prompt", b"work")}


class SharedStack:
    def __init__(self, config: RunConfig, folder: Path, ranks: Ranks, redis_url: str) -> None:
        self._folder = folder
        self._ranks = ranks
        self._redis_url = redis_url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stop_ids = eos_token_ids(Path(config.model.path))
        # The engine core in a process of its own: this one's default process group is the trainer's.
        with mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}):
            self._engine = self.call(Engine.start(config, self._stop_ids), 300.0)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        """`work` on the services' loop. A failure to end says where everything stands."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            stacks = io.StringIO()
            for task in asyncio.all_tasks(self._loop):
                task.print_stack(file=stacks)
            raise AssertionError(f"not done after {timeout_s:g} s:\n{stacks.getvalue()}") from None

    def close(self) -> None:
        async def down() -> None:
            self._engine.shutdown()

        self.call(down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def run(self, config: RunConfig) -> Finished:
        """A whole run of the trainer's, to the end of its data."""
        directory = self._folder / config.name
        directory.mkdir()
        environment = {
            "HEADRACE_REDIS_URL": self._redis_url,
            "HEADRACE_TOKEN": TOKEN,
            "HEADRACE_RUN_DIR": str(directory),
        }
        with mock.patch.dict(os.environ, environment):
            services = self._services(config)
            address = self.call(services.__aenter__())
            try:
                with mock.patch.dict(os.environ, {"HEADRACE_COORDINATOR": address}):
                    code = Trainer(config, self._ranks, directory, directory / "stop").run()
            finally:
                self.call(services.__aexit__(None, None, None))
        ledger = SyncLedger(connect(self._redis_url), config.name)
        with contextlib.closing(ledger):
            stats = ledger.run(ops.stats())
            report = audit_run(RunLayout(directory), ledger, is_on=False)
            records = {
                f"{n:010d}": _texts(cast(Any, ledger.redis).hgetall(f"{keys.prefix(config.name)}s:{n:010d}"))
                for n in range(stats.issued_total)
            }
        return Finished(code, directory, stats, report, records)

    @contextlib.asynccontextmanager
    async def _services(self, config: RunConfig) -> AsyncIterator[str]:
        """Coordinator, queue and rollouter of one run; yields the coordinator's address."""
        client = connect_async(self._redis_url)
        ledger = AsyncLedger(client, config.name)
        loops = await prepare(config, client)
        driver = Driver(config, ledger)
        server = grpc.aio.server(interceptors=[TokenInterceptor(TOKEN)], options=coordinator_stream.SERVER)
        sync_pb2_grpc.add_CoordinatorServicer_to_server(CoordinatorServicer(driver), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await driver.recover()
        await server.start()
        owner = "rollouter-0-shared"
        scorer = build_scorer(config)
        engine = Engine(config, self._engine._llm, self._stop_ids)
        trace = engine.trace = recorder(config, "rollouter-0")
        vocabulary = vocabulary_size(Path(config.model.path))
        turns = environment_turns(config, self._stop_ids, vocabulary)
        decode = _decoder(config, self._stop_ids)
        reader = SampleReader(config, vocabulary)
        worker = Worker(config, ledger, engine, scorer, decode, owner, reader, trace, turns)
        member = Member(config, engine, worker, owner, address, TOKEN)
        stop = asyncio.Event()

        async def beat() -> None:
            for count in itertools.count(1):
                await ledger.run(ops.beat(owner, count))
                await asyncio.sleep(1.0)  # the period of a beat, nothing waits for it

        async def tell() -> None:
            """As the process does, at a higher rate: windows are short here."""
            began = time.monotonic()
            trace.complete("tells", int(began * 1e9), int(began * 1e9), track="engine")
            while True:
                now = _telemetry(engine, worker, engine.active_s, time.monotonic() - began)
                await client.hset(telemetry_key(config.name), owner, encode(now))
                await asyncio.sleep(0.02)  # the period of the telling, nothing waits for it

        tasks = [asyncio.create_task(run_loop(loop, Pulse(), stop)) for loop in loops]
        tasks += [asyncio.create_task(c) for c in (driver.run(), worker.run(), member.run(), beat(), tell())]
        try:
            yield address
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
            _, late = await asyncio.wait(tasks, timeout=20.0)
            for task in late:  # a service would end with its process: say which part did not by itself
                task.print_stack()
            await _report_the_last(loops)
            await asyncio.wait([asyncio.ensure_future(server.stop(None))], timeout=20.0)
            await scorer.close()
            await client.aclose()
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


@contextlib.contextmanager
def shared_stack(config: RunConfig, folder: Path, ranks: Ranks) -> Iterator[SharedStack]:
    with start_valkey(folder, "secret") as server:
        stack = SharedStack(config, folder, ranks, server.url)
        try:
            yield stack
        finally:
            stack.close()
