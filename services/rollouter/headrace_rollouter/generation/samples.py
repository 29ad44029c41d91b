"""Takes one sample from take to finish: generates its group and scores it, or parks, hands back or fails it.

The ledger fences every operation by owner and attempt. A `fenced` answer means that another rollouter owns
the sample now, and what was generated here is discarded.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import traceback
from collections.abc import Callable

from headrace.config.run import RunConfig
from headrace.environments.loading import EnvironmentFailed
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.replies import Claimed, Payload, Taken, Verdict
from headrace.metrics import rollouter as metrics
from headrace.wire.encodable import encodable
from headrace.wire.payloads import (
    FinishReason,
    Prompt,
    Sample,
    Trajectory,
    WireError,
    empty_trajectory,
    encode_parked,
    encode_sample,
)
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter.generation.scoring import Scoring
from headrace_rollouter.generation.seeds import sampling_seed
from headrace_rollouter.generation.trajectories import SeedOf, Trajectories
from headrace_rollouter.inference.engine import Engine
from headrace_rollouter.inference.serving import Serving

log = logging.getLogger("headrace.rollouter.samples")


class Samples:
    """Runs samples. `began_with` is called with (sample, its oldest version) once parked work is decoded."""

    def __init__(
        self,
        config: RunConfig,
        ledger: AsyncLedger,
        engine: Engine,
        serving: Serving,
        trajectories: Trajectories,
        scoring: Scoring,
        owner: str,
        reader: SampleReader,
        began_with: Callable[[Taken, int], None],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._engine = engine
        self._serving = serving
        self._trajectories = trajectories
        self._scoring = scoring
        self._owner = owner
        self._reader = reader
        self._began_with = began_with
        self.finished = 0

    @property
    def group_size(self) -> int:
        """Number of trajectories to train on, plus the greedy baseline, if any, which comes last."""
        return self._config.rollout.n + self._config.has_greedy_baseline

    async def run(self, item: Taken, oldest: int, shown: dict[str, object]) -> None:
        """Run one sample from take to finish.

        `oldest`: version of the oldest token that parked work may have. `shown`: arguments of the sample's
        slice in the trace, to be added to.
        """
        began = time.monotonic()
        try:
            prompt = self._reader.prompt(item.prompt, item.sample_id)
            group = self._fresh_group()
            if item.work:
                group = self._reader.parked(item.work, oldest, self._serving.version)
            self._began_with(item, min([self._serving.version, *(v[0] for t in group if (v := t.versions))]))
        except WireError as error:
            await self._fail(item, "malformed", encodable(str(error)))
            return
        seeds = self._seeds(prompt, item.failures)
        task_seeds = self._task_seeds(prompt, item.failures)
        try:
            group = await self._generate_group(prompt, group, seeds, task_seeds)
        except TimeoutError:
            await self._fail(item, "timeout", f"no finish within {self._config.rollout.sample_timeout_s:g} s")
            return
        except EnvironmentFailed as error:
            await self._fail(item, "environment_error", _trace(error))
            return
        except (
            Exception
        ) as error:  # the engine refused this request: the sample's fault until proven otherwise
            await self._engine.check()  # a dead engine is not the sample's fault: this raises
            await self._fail(item, "generation_error", _trace(error))
            return
        if any(t.finish_reason is FinishReason.UNFINISHED for t in group):
            await self._let_go(item, group)
            return
        generated = time.monotonic()
        try:
            await self._scoring.group(prompt, group, task_seeds)
        except EnvironmentFailed as error:
            await self._fail(item, "environment_error", _trace(error))
            return
        except Exception as error:  # user code: RewardError, and whatever else it manages to raise
            await self._fail(item, "reward_error", _trace(error))
            return
        scored = time.monotonic()
        await self._serving.trusted.wait()
        baseline = group.pop().reward if self._config.has_greedy_baseline else None
        sample = Sample(
            prompt,
            group,
            self._owner,
            item.attempt,
            generated - began,
            scored - generated,
            baseline,
        )
        shown["partial"] = sample.span > 0
        try:
            encoded = encode_sample(sample)
        except Exception as error:  # what a reward or an environment returned cannot be encoded
            await self._fail(item, "reward_error", _trace(error))
            return
        try:
            told = self._checked(item, sample, encoded)
        except WireError as error:
            await self._fail(item, "malformed", encodable(str(error)))
            return
        verdict = await self._ledger.run(
            ops.finish(
                self._owner,
                told.sample_id,
                told.attempt,
                encoded,
                told.min_version,
                told.max_version,
                told.tokens,
            )
        )
        if verdict is Verdict.FENCED:
            log.warning("finish refused", extra={"sample": item.sample_id, "attempt": item.attempt})
            metrics.FENCED.inc()
            return
        self.finished += 1
        metrics.SAMPLES.inc()

    def _checked(self, item: Taken, sample: Sample, encoded: bytes) -> Claimed:
        """The claims to report to the ledger.

        Raises WireError for what the trainer would refuse. Failing here puts the error into the log of the
        rollouter that generated the sample.
        """
        if not all(t.segments for t in sample.trajectories):
            raise WireError("a finished trajectory has no tokens")
        oldest, newest = sample.min_version, sample.max_version
        told = Claimed(item.sample_id, item.attempt, oldest, newest, sample.tokens)
        self._reader.sample(Payload(encoded, item.prompt, self._owner), told)
        return told

    def _fresh_group(self) -> list[Trajectory]:
        return [empty_trajectory(self._config.rollout.temperature) for _ in range(self.group_size)]

    def _seeds(self, prompt: Prompt, failures: int) -> list[SeedOf]:
        """Sampling seeds, one function per trajectory. It returns None for the greedy one."""

        def seed_of(index: int, have: int) -> int | None:
            if index == self._config.rollout.n:
                return None
            return sampling_seed(self._config.seed, prompt.sample_id, index, have, failures)

        return [functools.partial(seed_of, index) for index in range(self.group_size)]

    def _task_seeds(self, prompt: Prompt, failures: int) -> list[int]:
        """The environment's seed for each trajectory, the greedy one included."""
        seed, sample_id = self._config.seed, prompt.sample_id
        return [sampling_seed(seed, sample_id, index, 0, failures) for index in range(self.group_size)]

    async def _generate_group(
        self, prompt: Prompt, group: list[Trajectory], seeds: list[SeedOf], task_seeds: list[int]
    ) -> list[Trajectory]:
        """Continue every unfinished trajectory. Raises TimeoutError past the sample's deadline."""
        deadline = self._serving.clock() + self._config.rollout.sample_timeout_s
        calls = [
            asyncio.ensure_future(self._trajectory(prompt, t, seed_of, task_seed))
            for t, seed_of, task_seed in zip(group, seeds, task_seeds, strict=True)
        ]
        pending = set(calls)
        try:
            while pending:
                left = deadline - self._serving.clock()
                if left <= 0:
                    raise TimeoutError
                _, pending = await asyncio.wait(pending, timeout=min(max(left, 0.01), 5.0))
        finally:
            for call in pending:
                call.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            raise errors[0]
        return [call.result() for call in calls]

    async def _trajectory(self, prompt: Prompt, t: Trajectory, seed_of: SeedOf, task_seed: int) -> Trajectory:
        if t.finish_reason is not FinishReason.UNFINISHED:
            return t
        done = await self._trajectories.to_the_end(prompt, t, seed_of, task_seed)
        if done.finish_reason is not FinishReason.UNFINISHED and seed_of(0) is not None:
            reason = done.finish_reason.name.lower()
            metrics.RESPONSE_TOKENS.labels(finish_reason=reason).observe(len(done.token_ids))
        return done

    async def _fail(self, item: Taken, reason: str, detail: str) -> None:
        """Report the sample as failed. `detail` must be encodable (UTF-8)."""
        answer = await self._ledger.run(ops.fail(self._owner, item.sample_id, item.attempt, reason, detail))
        log.warning(
            "sample failed",
            extra={
                "sample": item.sample_id,
                "reason": reason,
                "answer": str(answer),
                "detail": detail[-300:],
            },
        )
        metrics.FAILED.labels(reason=reason).inc()

    async def _let_go(self, item: Taken, group: list[Trajectory]) -> None:
        """Park a group that a drain interrupted, or hand the sample back if it has no tokens yet."""
        versions = [v[0] for t in group if (v := t.versions)]
        if versions:
            op = ops.park(self._owner, item.sample_id, item.attempt, encode_parked(group), min(versions))
        else:
            op = ops.hand_back(self._owner, item.sample_id, item.attempt)
        verdict = await self._ledger.run(op)
        log.info("let go", extra={"sample": item.sample_id, "by": op.script, "verdict": str(verdict)})


def _trace(error: BaseException) -> str:
    return encodable("".join(traceback.format_exception(error)))[-3500:]
