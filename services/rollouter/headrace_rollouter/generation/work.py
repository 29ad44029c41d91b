"""Takes prompts and tracks what runs: the work of one rollouter.

A sample goes through take -> generate the unfinished trajectories -> reward -> finish (`samples`). On the way
it may be parked (drain), handed back (nothing generated yet) or failed (reward, environment, timeout,
malformed). Held-out prompts take precedence (`validation`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable

from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.replies import Taken
from headrace.metrics import rollouter as metrics
from headrace.rewards import Scorer
from headrace.traces.recording import Lanes, Recorder
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter.generation.environment_turns import EnvironmentTurns
from headrace_rollouter.generation.failures import Failures
from headrace_rollouter.generation.samples import Samples
from headrace_rollouter.generation.scoring import Scoring
from headrace_rollouter.generation.trajectories import Trajectories
from headrace_rollouter.generation.validation import Validation
from headrace_rollouter.inference.engine import Engine
from headrace_rollouter.inference.serving import Serving

log = logging.getLogger("headrace.rollouter.work")

_IDLE_POLL_S = 0.02

Attempt = tuple[str, int]
"""(sample id, attempt): a reclaimed sample may be taken again while its old attempt is still ending."""


class Worker:
    """The work of one rollouter. `serving` is set while the engine runs under a committed version."""

    def __init__(
        self,
        config: RunConfig,
        ledger: AsyncLedger,
        engine: Engine,
        scorer: Scorer,
        decode: Callable[[list[int]], str],
        owner: str,
        reader: SampleReader,
        trace: Recorder | None = None,
        environment: EnvironmentTurns | None = None,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self.trace = trace or Recorder(None, owner)
        self._sample_lanes = Lanes(self.trace, "samples")
        self._engine = engine
        self._owner = owner
        self._state = state = Serving()
        self._trajectories = Trajectories(config, engine, decode, state, environment)
        self._scoring = Scoring(config, scorer, decode, self._trajectories)
        self._samples = Samples(
            config, ledger, engine, state, self._trajectories, self._scoring, owner, reader, self._began_with
        )
        self._failures = Failures(log)
        self._validation = Validation(
            config,
            ledger,
            engine,
            state,
            self._trajectories,
            self._scoring,
            owner,
            reader,
            self.trace,
            self._failures,
        )
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        self._oldest: dict[Attempt, int] = {}
        """Lower bound on the versions of a running sample's tokens."""
        self.taking = False
        """A take is in flight. The samples that it returns belong to the version before a pause."""

    # -- what the coordinator's stream calls -----------------------------------------------------

    def paused(self) -> None:
        self._state.paused()

    def resumed(self, version: int) -> None:
        self._validation.look_again()
        self._state.resumed(version)

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def serving(self) -> asyncio.Event:
        return self._state.running

    @property
    def trusted(self) -> asyncio.Event:
        """The canary of the current version has passed, so results may leave."""
        return self._state.trusted

    @property
    def draining(self) -> bool:
        """Whether a drain has begun. Nothing new starts, running requests continue until the engine aborts
        them, and answers of environments are not awaited."""
        return self._state.draining

    @draining.setter
    def draining(self, begins: bool) -> None:
        if begins:
            self._state.drain_began.set()

    @property
    def running(self) -> int:
        return len(self._tasks)

    def running_through(self, version: int) -> int:
        """Running samples that may have tokens of `version` or older."""
        return sum(oldest <= version for oldest in self._oldest.values())

    @property
    def samples_finished(self) -> int:
        return self._samples.finished

    @property
    def scored(self) -> int:
        """Trajectories sent to the reward function plus turns that the environment has answered.

        Together with the engine's tokens this is the progress of running work.
        """
        return self._scoring.scored + self._trajectories.answers

    @property
    def target_sequences(self) -> int:
        """Number of sequences that run when every slot is taken."""
        return self._config.rollout.max_concurrent_samples * self._samples.group_size

    # -- taking ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take work until a drain begins.

        Raises what a sample's task could not handle, above all a dead engine. The process must then end, so
        that its lease expires and its samples go to others.
        """
        while not self.draining:
            if self._failures.fatal is not None:
                raise self._failures.fatal
            if not self.serving.is_set():
                with contextlib.suppress(TimeoutError):  # check `draining` now and then
                    await asyncio.wait_for(self.serving.wait(), 0.2)
                continue
            took = await self._validation.take()
            r = self._config.rollout  # a held-out prompt is one response, a sample is n of them
            free = r.max_concurrent_samples - len(self._tasks) - len(self._validation.tasks) // r.n
            if free > 0 and not self.draining:
                took += await self._take(free)
            if not took:
                await asyncio.sleep(_IDLE_POLL_S)

    async def _take(self, free: int) -> int:
        # Parked work is generated from scratch if it should have finished before this version: resuming it
        # would let the version gap exceed its bound.
        through = self._config.rule.finish_through(self.version)
        oldest = -1 if through is None else through + 1
        self.taking = True
        try:
            reply = await self._ledger.run(ops.take(self._owner, self.version, free, oldest_version=oldest))
        finally:
            # There is no await between here and the registration below, so a pause sees one or the other.
            self.taking = False
        # Any refusal means: wait. The coordinator's stream brings a member up to date and readmits it when it
        # was expired or a new trainer does not know it yet.
        metrics.TAKES.labels(status=str(reply.status)).inc()
        for item in reply.items:
            # Until parked work is decoded, its tokens may be of any age.
            attempt = (item.sample_id, item.attempt)
            self._oldest[attempt] = -1 if item.work else self.version
            self._tasks[attempt] = task = asyncio.create_task(self._sample(item, oldest))
            task.add_done_callback(functools.partial(self._ended, attempt))
        return len(reply.items)

    def _ended(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        self._tasks.pop(attempt, None)
        self._oldest.pop(attempt, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.add("sample task failed", error, fatal=True, sample=attempt[0])

    def _began_with(self, item: Taken, oldest: int) -> None:
        self._oldest[item.sample_id, item.attempt] = oldest

    async def _sample(self, item: Taken, oldest: int) -> None:
        with self._sample_lanes.slice("sample", sample_id=item.sample_id, version=self.version) as shown:
            await self._samples.run(item, oldest, shown)

    # -- the end ---------------------------------------------------------------------------------

    async def drop_work(self) -> None:
        """Cancel everything that runs. It belongs to others now, and its results would be fenced."""
        running = [*self._tasks.values(), *self._validation.tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._engine.abort_all()
        log.info("work dropped", extra={"samples": len(running)})

    async def drop_lost(self) -> None:
        """Cancel running samples that this owner has lost. Those taken since continue."""
        dropped = 0
        for attempt, task in list(self._tasks.items()):
            sample = await self._ledger.run(ops.sample(attempt[0])) or {}
            holds = (sample.get("state"), sample.get("owner"), sample.get("attempt"))
            if holds != ("in_flight", self._owner, str(attempt[1])):
                dropped += task.cancel()
        log.info("lost work dropped", extra={"samples": dropped})

    async def drain(self) -> None:
        """Stop taking, and park or hand back everything. On return this rollouter owns no samples."""
        self.draining = True
        self.trusted.set()  # what is complete may still leave
        self._validation.cancel()
        await self._engine.abort_all()
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=1.0)
            await self._engine.abort_all()
