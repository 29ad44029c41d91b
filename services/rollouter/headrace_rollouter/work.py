"""Takes prompts, generates each group, scores it, finishes the sample.

What a sample goes through here: take -> generate the trajectories that are not finished -> reward ->
finish. On the way it may be parked (drain), handed back (nothing generated yet) or failed (reward,
time-out, malformed). The ledger fences everything by owner and attempt; a `fenced` answer means that
somebody else owns the sample now, and what was generated here is let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.config import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.replies import Taken, Verdict
from headrace.reward import RewardError, Scorer
from headrace.trace import Lanes, Recorder
from headrace.v1 import sample_pb2 as pb
from headrace.wire import (
    FinishReason,
    Prompt,
    Sample,
    Trajectory,
    WireError,
    decode_parked,
    decode_prompt,
    empty_trajectory,
    encode_parked,
    encode_sample,
)
from headrace_rollouter import metrics
from headrace_rollouter.engine import Engine

log = logging.getLogger("headrace.rollouter.work")

_IDLE_POLL_S = 0.02
_VALIDATION_POLL_S = 1.0
_VALIDATION_CHUNK = 16
_ANSWER_CHARS = 1000

Attempt = tuple[str, int]
"""(sample id, attempt): a sample that was taken back may come again while its old attempt still ends."""


def sampling_seed(run_seed: int, sample_id: str, index: int, have: int, failures: int = 0) -> int:
    """Seed of one trajectory, a pure function of what it is; `have` tokens already exist.

    A sample that has failed is not sampled in the same way again.
    """
    again = f"/{failures}" if failures else ""
    digest = hashlib.sha256(f"{run_seed}/{sample_id}/{index}/{have}{again}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


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
        trace: Recorder | None = None,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self.trace = trace or Recorder(None, owner)
        self._sample_lanes = Lanes(self.trace, "samples")
        self._val_lanes = Lanes(self.trace, "validation")
        self._engine = engine
        self._scorer = scorer
        self._decode = decode
        self._owner = owner
        self.version = -1
        self.serving = asyncio.Event()
        self.trusted = asyncio.Event()
        """The canary of the present version has passed: results may leave."""
        self.draining = False
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        self._oldest: dict[Attempt, int] = {}
        """No token of the running sample is of an older version than this."""
        self.taking = False
        """A request for work is under way: what it brings belongs to the version before a pause."""
        self._val_tasks: set[asyncio.Task[None]] = set()
        self._val_next_poll = 0.0
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self.samples_finished = 0
        self.scored = 0
        """Trajectories given to the reward: with the engine's tokens, the sign of life of running work."""
        self._failure: BaseException | None = None

    # -- what the coordinator's stream calls -----------------------------------------------------

    def paused(self) -> None:
        self.serving.clear()
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resumed(self, version: int) -> None:
        self.version = version
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None
        self._val_next_poll = 0.0
        self.trusted.clear()
        self.serving.set()

    @property
    def running(self) -> int:
        return len(self._tasks)

    def running_through(self, version: int) -> int:
        """Running samples that may have tokens of `version` or older."""
        return sum(oldest <= version for oldest in self._oldest.values())

    def _clock(self) -> float:
        """Monotonic seconds that stand still while a sync pauses the engine."""
        now = self._paused_at if self._paused_at is not None else time.monotonic()
        return now - self._paused_s

    # -- taking ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes until told to drain. Raises what a sample's task could not handle, a dead engine first of
        all: the process must end then, so that the lease gives back what it owns.
        """
        while not self.draining:
            if self._failure is not None:
                raise self._failure
            if not self.serving.is_set():
                with contextlib.suppress(TimeoutError):  # look at `draining` now and then
                    await asyncio.wait_for(self.serving.wait(), 0.2)
                continue
            took = await self._take_validation()
            r = self._config.rollout  # a held-out prompt is one response, a sample is n of them
            free = r.max_concurrent_samples - len(self._tasks) - len(self._val_tasks) // r.n
            if free > 0 and not self.draining:
                took += await self._take(free)
            if not took:
                await asyncio.sleep(_IDLE_POLL_S)

    async def _take(self, free: int) -> int:
        # Parked work that should have finished before this version starts again: going on with it would let
        # the version gap grow beyond its bound.
        through = self._config.rule.finish_through(self.version)
        oldest = -1 if through is None else through + 1
        self.taking = True
        try:
            reply = await self._ledger.run(ops.take(self._owner, self.version, free, oldest_version=oldest))
        finally:
            # No other task runs between here and the registration below.
            self.taking = False
        # Any refusal means: wait. A member that was expired, or that a new trainer does not know yet, is
        # brought up to date and admitted again through the coordinator's stream.
        metrics.TAKES.labels(status=str(reply.status)).inc()
        for item in reply.items:
            # Until parked work is read, what it holds may be as old as can be.
            attempt = (item.sample_id, item.attempt)
            self._oldest[attempt] = -1 if item.work else self.version
            self._tasks[attempt] = task = asyncio.create_task(self._sample(item))
            task.add_done_callback(functools.partial(self._ended, attempt))
        return len(reply.items)

    def _ended(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        self._tasks.pop(attempt, None)
        self._oldest.pop(attempt, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sample task failed", exc_info=error, extra={"sample": attempt[0]})
            self._failure = self._failure or error

    # -- one sample ------------------------------------------------------------------------------

    async def _sample(self, item: Taken) -> None:
        with self._sample_lanes.slice("sample", sample_id=item.sample_id, version=self.version) as shown:
            await self._whole_sample(item, shown)

    async def _whole_sample(self, item: Taken, shown: dict[str, object]) -> None:
        """From take to finish. `shown`: what the timeline tells about the sample."""
        began = time.monotonic()
        try:
            prompt = decode_prompt(item.prompt)
            group = decode_parked(item.work) if item.work else self._fresh_group()
            if len(group) != self._group_size:
                raise WireError(f"parked group of {len(group)}, {self._group_size} are asked for")
            self._oldest[item.sample_id, item.attempt] = min(
                [self.version, *(v[0] for t in group if (v := t.versions))]
            )
        except WireError as error:
            await self._fail(item, "malformed", str(error))
            return
        try:
            group = await self._generate_group(prompt, group, item.failures)
        except TimeoutError:
            await self._fail(item, "timeout", f"no finish within {self._config.rollout.sample_timeout_s:g} s")
            return
        except (
            Exception
        ) as error:  # the engine refused this request: the sample's fault until proven otherwise
            await self._engine.check()  # a dead engine is not the sample's fault: raises, the owner expires
            await self._fail(item, "generation_error", _trace(error))
            return
        if any(t.finish_reason is FinishReason.UNFINISHED for t in group):
            await self._let_go(item, group)
            return
        generated = time.monotonic()
        try:
            await self._score(prompt, group)
        except Exception as error:  # user code: RewardError, and whatever else it manages to raise
            await self._fail(item, "reward_error", _trace(error))
            return
        await self.trusted.wait()
        baseline = group.pop().reward if self._config.has_greedy_baseline else None
        sample = Sample(
            prompt,
            group,
            self._owner,
            item.attempt,
            generated - began,
            time.monotonic() - generated,
            baseline,
        )
        shown["partial"] = sample.span > 0
        verdict = await self._ledger.run(
            ops.finish(
                self._owner,
                item.sample_id,
                item.attempt,
                encode_sample(sample),
                sample.min_version,
                sample.max_version,
                sample.tokens,
            )
        )
        if verdict is Verdict.FENCED:
            log.warning("finish refused", extra={"sample": item.sample_id, "attempt": item.attempt})
            metrics.FENCED.inc()
            return
        self.samples_finished += 1
        metrics.SAMPLES.inc()

    @property
    def target_sequences(self) -> int:
        """Sequences that run when every slot is taken."""
        return self._config.rollout.max_concurrent_samples * self._group_size

    @property
    def _group_size(self) -> int:
        """Trajectories to train and, behind them, the greedy one where there is one."""
        return self._config.rollout.n + self._config.has_greedy_baseline

    def _fresh_group(self) -> list[Trajectory]:
        return [empty_trajectory(self._config.rollout.temperature) for _ in range(self._group_size)]

    async def _generate_group(
        self, prompt: Prompt, group: list[Trajectory], failures: int
    ) -> list[Trajectory]:
        """Every unfinished trajectory continued. Raises TimeoutError past the sample's deadline."""
        deadline = self._clock() + self._config.rollout.sample_timeout_s
        calls = [
            asyncio.ensure_future(self._trajectory(prompt, t, index, failures))
            for index, t in enumerate(group)
        ]
        pending = set(calls)
        try:
            while pending:
                left = deadline - self._clock()
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

    async def _trajectory(self, prompt: Prompt, t: Trajectory, index: int, failures: int) -> Trajectory:
        if t.finish_reason is not FinishReason.UNFINISHED or self.draining:
            return t
        seed: int | None = sampling_seed(
            self._config.seed, prompt.sample_id, index, len(t.token_ids), failures
        )
        if index == self._config.rollout.n:
            seed = None  # the greedy one
        done = await self._engine.generate(prompt.token_ids, t, seed)
        if done.finish_reason is not FinishReason.UNFINISHED and seed is not None:
            reason = done.finish_reason.name.lower()
            metrics.RESPONSE_TOKENS.labels(finish_reason=reason).observe(len(done.token_ids))
        return done

    async def _score(self, prompt: Prompt, group: list[Trajectory]) -> None:
        scores = await asyncio.gather(*(self._score_one(prompt, t) for t in group))
        for t, (reward, parts) in zip(group, scores, strict=True):
            t.reward, t.reward_parts = reward, parts
            missing = [k for k in self._config.algorithm.gdpo_reward_keys if k != "score" and k not in parts]
            if missing:
                raise RewardError(
                    f"the reward has no {', '.join(missing)} (algorithm.gdpo_reward_keys), only "
                    f"{sorted(parts)}"
                )

    async def _score_one(self, prompt: Prompt, t: Trajectory) -> tuple[float, dict[str, float]]:
        text = self._decode(t.token_ids.tolist())
        self.scored += 1
        info = self._extra_info(prompt, t)
        return await self._scorer.score(prompt.data_source, text, prompt.ground_truth, info)

    @staticmethod
    def _extra_info(prompt: Prompt, t: Trajectory) -> dict[str, Any]:
        return {**prompt.extra_info, "finish_reason": t.finish_reason.name.lower()}

    async def _fail(self, item: Taken, reason: str, detail: str) -> None:
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
        """Interrupted by the drain: park what there is, or hand back what never began."""
        versions = [v[0] for t in group if (v := t.versions)]
        if versions:
            op = ops.park(self._owner, item.sample_id, item.attempt, encode_parked(group), min(versions))
        else:
            op = ops.hand_back(self._owner, item.sample_id, item.attempt)
        verdict = await self._ledger.run(op)
        log.info("let go", extra={"sample": item.sample_id, "by": op.script, "verdict": str(verdict)})

    async def drop_work(self) -> None:
        """End everything that runs: it is others' by now, and would be refused."""
        running = [*self._tasks.values(), *self._val_tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._engine.abort_all()
        log.info("work dropped", extra={"samples": len(running)})

    # -- drain -----------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Stop taking; park or hand back everything. When it returns nothing is owned any more."""
        self.draining = True
        self.trusted.set()  # what is complete may still leave
        for task in list(self._val_tasks):
            task.cancel()
        await self._engine.abort_all()
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=1.0)
            await self._engine.abort_all()

    # -- validation ------------------------------------------------------------------------------

    async def _take_validation(self) -> int:
        """Held-out prompts come ahead of training ones."""
        if time.monotonic() < self._val_next_poll or len(self._val_tasks) >= 4 * _VALIDATION_CHUNK:
            return 0
        version = self.version
        rows = await self._ledger.run(ops.val_take(self._owner, version, _VALIDATION_CHUNK))
        if not rows:
            # Rows may come back later, from an owner that expires.
            self._val_next_poll = time.monotonic() + _VALIDATION_POLL_S
        for row, payload in rows:
            task = asyncio.create_task(self._validate(version, row, payload))
            self._val_tasks.add(task)
            task.add_done_callback(self._val_ended)
        return len(rows)

    def _val_ended(self, task: asyncio.Task[None]) -> None:
        self._val_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("validation task failed", exc_info=error)

    async def _validate(self, version: int, row: int, payload: bytes) -> None:
        with self._val_lanes.slice("validate", row=row, version=version):
            await self._validate_row(version, row, payload)

    async def _validate_row(self, version: int, row: int, payload: bytes) -> None:
        """One response to a held-out prompt. A reward that fails counts 0 and is logged: the row must end."""
        prompt = decode_prompt(payload)
        temperature = self._config.val.temperature
        seed = sampling_seed(self._config.seed, f"val-{version}-{row}", 0, 0) if temperature else None
        t = await self._engine.generate(prompt.token_ids, empty_trajectory(temperature or 1.0), seed)
        if t.finish_reason is FinishReason.UNFINISHED or t.versions != (version, version):
            return  # a score never mixes versions; the round that closed this validation reports the rest
        text = self._decode(t.token_ids.tolist())
        self.scored += 1
        try:
            reward, answer = await self._scorer.judge(
                prompt.data_source, text, prompt.ground_truth, self._extra_info(prompt, t)
            )
        except RewardError as error:
            log.warning("validation reward failed", extra={"row": row, "error": str(error)})
            reward, answer = 0.0, ""
        await self.trusted.wait()
        result = pb.ValidationResult(
            version=version,
            row=row,
            data_source=prompt.data_source,
            reward=reward,
            response_tokens=np.int64(len(t.token_ids)).item(),
            answer=answer[:_ANSWER_CHARS],
        )
        await self._ledger.run(ops.val_finish(self._owner, version, row, result.SerializeToString()))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-3500:]
