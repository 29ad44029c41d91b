"""Rollouters that come and go, many in one process: `python -m tests.chaos.comers --config FILE --comers N`.

All but the engine is real: beats, membership, weight groups, work. Each takes part until it has finished a
sample, and goes: the one in order, the next without a word, so that its lease has to end. Prints a line each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import uuid
from pathlib import Path

from headrace.config.loading import load
from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.connections.redis_client import connect, connect_async
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, SyncLedger
from headrace.models.files import eos_token_ids
from headrace.rewards import build_scorer
from headrace.service import telemetry
from headrace.system import logs
from headrace.traces.service_recorder import recorder
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter.generation.environment_turns import environment_turns
from headrace_rollouter.generation.work import Worker
from headrace_rollouter.membership.beats import Beats
from headrace_rollouter.membership.member import Expelled, Member
from headrace_rollouter.service import _decoder
from tests.chaos.membership import NAMED
from tests.support import scripted_rollouter
from tests.support.scripted_rollouter import ScriptedEngine

TAKES_PART_S = 120.0
END_S = 10.0


async def come_and_go(config: RunConfig, number: int, stop_ids: list[int]) -> None:
    owner = f"{NAMED}{uuid.uuid4().hex[:8]}"
    client = connect_async(variables.redis_url())
    ledger = AsyncLedger(client, config.name, waits_when_full=True)
    lease_s = config.ledger.lease_s
    beats = Beats(
        SyncLedger(connect(variables.redis_url(), lease_s / 3), config.name, retry_s=0.0),
        owner,
        lease_s,
        config.redis.outage_timeout_s,
    )
    scorer = build_scorer(config)
    await scorer.start()
    engine = ScriptedEngine(config, None, stop_ids)
    worker = Worker(
        config,
        ledger,
        engine,
        scorer,
        _decoder(config, stop_ids),
        owner,
        SampleReader(config, scripted_rollouter.VOCABULARY),
        recorder(config, "rollouter-comer"),
        environment_turns(config, stop_ids, scripted_rollouter.VOCABULARY),
    )
    member = Member(config, engine, worker, owner, variables.coordinator(), variables.token())
    beats.start()
    tasks = [asyncio.create_task(part) for part in (worker.run(), member.run(), beats.run())]
    try:
        async with asyncio.timeout(TAKES_PART_S):
            while worker.samples_finished == 0 and not any(task.done() for task in tasks):
                await asyncio.sleep(0.05)  # poll interval
        await telemetry.tell(client, config.name, owner, telemetry.RolloutTelemetry())
        if number % 2:
            await asyncio.wait_for(worker.drain(), 30.0)
            await asyncio.to_thread(beats.stop)
            await member.leave()
            await ledger.run(ops.expire(owner, "left", left=True))
        for task in tasks:
            if task.done():
                with contextlib.suppress(Expelled):  # it was late for a round: gone, too
                    task.result()
    finally:
        await asyncio.to_thread(beats.stop)
        for task in tasks:
            task.cancel()
        _, late = await asyncio.wait(tasks, timeout=END_S)
        for task in late:  # it would end with its process: say where it stands
            task.print_stack()
        await scorer.close()
        if engine._comm is not None:
            engine._comm.close()
        await client.aclose()


async def all_of_them(config: RunConfig, count: int) -> None:
    stop_ids = eos_token_ids(Path(config.model.path))
    told = json.loads((Path(config.model.path) / "config.json").read_text())
    scripted_rollouter.VOCABULARY = told["vocab_size"]
    for number in range(count):
        await come_and_go(config, number, stop_ids)
        print(f"comer {number + 1}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.comers", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--comers", type=int, required=True)
    args = parser.parse_args()
    logs.setup("comers")
    asyncio.run(all_of_them(load(args.config), args.comers))


if __name__ == "__main__":
    main()
