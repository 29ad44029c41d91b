"""Rewards finished trajectories: by the environment's own reward, or else by the run's reward function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headrace.config.run import RunConfig
from headrace.metrics import rollouter as metrics
from headrace.rewards import RewardError, Scorer
from headrace.wire.payloads import Prompt, Trajectory
from headrace_rollouter.generation.trajectories import Trajectories


class Scoring:
    """Scores trajectories. `decode`: ids to text, without special tokens."""

    def __init__(
        self,
        config: RunConfig,
        scorer: Scorer,
        decode: Callable[[list[int]], str],
        trajectories: Trajectories,
    ) -> None:
        self._keys = config.algorithm.gdpo_reward_keys
        self._scorer = scorer
        self._decode = decode
        self._trajectories = trajectories
        self.scored = 0
        """Number of trajectories sent to the reward function."""

    async def group(self, prompt: Prompt, group: Sequence[Trajectory], task_seeds: Sequence[int]) -> None:
        """Set each trajectory's reward, reward parts and environment metrics, and drop its state.

        `task_seeds`: the environment's seed for each trajectory. Raises RewardError, EnvironmentFailed, and
        whatever a function raises.
        """
        calls = [
            asyncio.ensure_future(self._one(prompt, t, s)) for t, s in zip(group, task_seeds, strict=True)
        ]
        try:
            await asyncio.gather(*calls)
        finally:
            for call in calls:  # one failure fails the sample, which is then generated again
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _one(self, prompt: Prompt, t: Trajectory, task_seed: int) -> None:
        outcome = await self._trajectories.outcome(prompt, t, task_seed)
        if outcome is None or outcome.reward is None:
            text = self._decode(t.token_ids.tolist())
            self.scored += 1
            with metrics.REWARD_SECONDS.time():
                t.reward, t.reward_parts = await self._scorer.score(
                    prompt.data_source, text, prompt.ground_truth, self._extra_info(prompt, t)
                )
        else:
            t.reward, t.reward_parts = outcome.reward, dict(outcome.reward_parts)
        if outcome is not None:
            t.environment_state, t.environment_metrics = None, dict(outcome.metrics)
        missing = [k for k in self._keys if k != "score" and k not in t.reward_parts]
        if missing:
            raise RewardError(
                f"the reward has no {', '.join(missing)} (algorithm.gdpo_reward_keys), only "
                f"{sorted(t.reward_parts)}"
            )

    async def judge(self, prompt: Prompt, t: Trajectory, task_seed: int) -> tuple[float, str]:
        """Score a response to a held-out prompt. Returns (score, answer for majority votes).

        Raises RewardError and EnvironmentFailed.
        """
        outcome = await self._trajectories.outcome(prompt, t, task_seed)
        if outcome is not None and outcome.reward is not None:
            return outcome.reward, self._trajectories.last_turn(t)
        text = self._decode(t.token_ids.tolist())
        self.scored += 1
        with metrics.REWARD_SECONDS.time():
            return await self._scorer.judge(
                prompt.data_source, text, prompt.ground_truth, self._extra_info(prompt, t)
            )

    def _extra_info(self, prompt: Prompt, t: Trajectory) -> dict[str, Any]:
        info = {**prompt.extra_info, "finish_reason": t.finish_reason.name.lower()}
        if self._trajectories.has_environment:
            info |= {"num_turns": t.turns, "last_turn": self._trajectories.last_turn(t)}
        return info
