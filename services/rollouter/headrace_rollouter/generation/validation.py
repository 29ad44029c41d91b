"""Answers held-out prompts ahead of training prompts: one scored response each, under a single version."""

from __future__ import annotations

import asyncio
import logging
import time

from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.traces.recording import Lanes, Recorder
from headrace.v1 import sample_pb2 as pb
from headrace.wire.encodable import encodable
from headrace.wire.payloads import FinishReason, Prompt, WireError, empty_trajectory
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter.generation.failures import UNDERSTOOD, Failures
from headrace_rollouter.generation.scoring import Scoring
from headrace_rollouter.generation.seeds import sampling_seed
from headrace_rollouter.generation.trajectories import Trajectories
from headrace_rollouter.inference.engine import Engine
from headrace_rollouter.inference.serving import Serving

log = logging.getLogger("headrace.rollouter.validation")

_POLL_S = 1.0
_CHUNK = 16
_ANSWER_CHARS = 1000


class Validation:
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
        trace: Recorder,
        failures: Failures,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._engine = engine
        self._serving = serving
        self._trajectories = trajectories
        self._scoring = scoring
        self._owner = owner
        self._reader = reader
        self._lanes = Lanes(trace, "validation")
        self._next_poll = 0.0
        self._failures = failures
        self.tasks: set[asyncio.Task[None]] = set()

    def look_again(self) -> None:
        """Poll at the next opportunity: a new version may have rows."""
        self._next_poll = 0.0

    def cancel(self) -> None:
        for task in list(self.tasks):
            task.cancel()

    async def take(self) -> int:
        """Start on the rows that are available and return their number."""
        if time.monotonic() < self._next_poll or len(self.tasks) >= 4 * _CHUNK:
            return 0
        version = self._serving.version
        rows = await self._ledger.run(ops.val_take(self._owner, version, _CHUNK))
        if not rows:
            # Rows may come back later, from an owner that expires.
            self._next_poll = time.monotonic() + _POLL_S
        for row, payload in rows:
            task = asyncio.create_task(self._validate(version, row, payload))
            self.tasks.add(task)
            task.add_done_callback(self._ended)
        return len(rows)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A dead engine or ledger must end the process. A row that cannot be answered must not.
            self._failures.add("validation task failed", error, fatal=isinstance(error, UNDERSTOOD))

    async def _validate(self, version: int, row: int, payload: bytes) -> None:
        with self._lanes.slice("validate", row=row, version=version):
            await self._row(version, row, payload)

    async def _row(self, version: int, row: int, payload: bytes) -> None:
        """Answer one held-out prompt.

        Any failure of the reward or the environment is logged and scores 0. The row must end, because the
        commit waits for it.
        """
        try:
            prompt = self._reader.prompt(payload)
        except WireError as error:  # without a data source it is reported as unfinished
            log.error("malformed held-out prompt", extra={"row": row, "reason": encodable(str(error))})
            await self._answer(version, row, "", 0.0, 0, "")
            return
        judged = await self._judged(version, row, prompt)
        if judged is not None:
            await self._answer(version, row, prompt.data_source, *judged)

    async def _judged(self, version: int, row: int, prompt: Prompt) -> tuple[float, int, str] | None:
        """Generate and score. Returns (reward, response tokens, answer), or None when the row was dropped."""
        temperature = self._config.val.temperature

        def seed_of(have: int) -> int | None:
            return sampling_seed(self._config.seed, f"val-{version}-{row}", 0, have) if temperature else None

        # Seeded by row, since `val.n` repeats a prompt. Every version meets the same environment.
        task_seed = sampling_seed(self._config.seed, f"val-{row}", 0, 0)
        t = empty_trajectory(temperature or 1.0)
        try:
            t = await self._trajectories.to_the_end(prompt, t, seed_of, task_seed)
            if t.finish_reason is FinishReason.UNFINISHED or t.versions != (version, version):
                # A score never mixes versions. The round that closed this validation reports such rows.
                return None
            reward, answer = await self._scoring.judge(prompt, t, task_seed)
        except Exception as error:  # user code, or a request that the engine refused
            await self._engine.check()  # a dead engine is not the row's fault: this raises
            log.warning("validation reward failed", extra={"row": row, "error": encodable(repr(error))})
            reward, answer = 0.0, ""
        return reward, len(t.token_ids), answer

    async def _answer(
        self, version: int, row: int, data_source: str, reward: float, tokens: int, answer: str
    ) -> None:
        await self._serving.trusted.wait()
        result = pb.ValidationResult(
            version=version,
            row=row,
            data_source=data_source,
            reward=reward,
            response_tokens=tokens,
            answer=encodable(answer)[:_ANSWER_CHARS],
        )
        await self._ledger.run(ops.val_finish(self._owner, version, row, result.SerializeToString()))
