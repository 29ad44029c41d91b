"""A model and an environment whose every word follows from what was said before, for the logic of turns."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.config.run import RunConfig
from headrace.environments import Done, Environment, Episode, Observation, Outcome, State, Task, Turn
from headrace.environments.host import EnvironmentHost
from headrace.wire.payloads import FinishReason, Int32Array, Prompt, Segment, Trajectory, extend
from headrace_rollouter.generation.environment_turns import EnvironmentTurns
from headrace_rollouter.generation.trajectories import Trajectories
from headrace_rollouter.inference.serving import Serving

EOS = 2
LIMIT = 40
VOCABULARY = 1000
PROMPT = Prompt("0000000007", 7, 0, 7, np.asarray([1, 5, 9], np.int32), "source", "truth", {"k": [1]})


def config(response: int = LIMIT, **environment: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m", "dtype": "float32"},
            "data": {"train_files": ["a"], "max_prompt_length": 8, "max_response_length": response},
            "rollout": {"total_rollout_steps": 8, "test_freq": 0, "n": 2},
            "actor": {"ppo_mini_batch_size": 2},
            "custom_reward_function": {"path": "r"},
            "environment": {"name": "calculator", **environment},
        }
    )


def decode(ids: list[int]) -> str:
    """Numbers with blanks; as with a tokenizer, the end of a turn is no text."""
    return " ".join(str(i) for i in ids if i != EOS)


def encode(observation: Observation) -> list[int]:
    return [int(word) for word in observation.text.split()]


class ScriptedEngine:
    """Samples a token by a hash of all before it; about one in five ends the turn.

    `cut_at`: response length at which `generate` is interrupted, as by an abort; `on_cut` is called then.
    """

    def __init__(self, serving: Serving, response: int = LIMIT, cut_at: int | None = None) -> None:
        self._serving = serving
        self._limit = response
        self._cut_at = cut_at
        self.seeds: list[int | None] = []

    async def generate(self, prompt_ids: Int32Array, head: Trajectory, seed: int | None) -> Trajectory:
        assert len(head.token_ids) < self._limit, "the engine refuses to generate nothing"
        self.seeds.append(seed)
        ids: list[int] = []
        reason = FinishReason.UNFINISHED
        while reason is FinishReason.UNFINISHED:
            have = len(head.token_ids) + len(ids)
            if have == self._cut_at:
                self._serving.drain_began.set()
                break
            await asyncio.sleep(0)
            ids.append(self.next_token([*prompt_ids.tolist(), *head.token_ids.tolist(), *ids]))
            if ids[-1] == EOS:
                reason = FinishReason.STOP
            elif have + 1 == self._limit:
                reason = FinishReason.LENGTH
        if not ids:
            return head
        tail = Trajectory(
            np.asarray(ids, np.int32),
            np.asarray([self.log_prob(i) for i in ids], np.float32),
            np.ones(len(ids), np.uint8),
            [Segment(self._serving.version, 0, len(ids))],
            head.temperature,
            reason,
        )
        return extend(head, tail)

    @staticmethod
    def next_token(before: list[int]) -> int:
        number = int.from_bytes(hashlib.sha256(str(before).encode()).digest()[:4], "little")
        return EOS if number % 5 == 0 else 10 + number % 40

    @staticmethod
    def log_prob(token: int) -> float:
        return -token / 100.0


class Counting(Environment):
    """Answers every turn with as many tokens as it has had turns, until `turns` of them; keeps account."""

    def __init__(self, turns: int = 4) -> None:
        self._turns = turns
        self.steps: list[Turn] = []
        self.gate: asyncio.Event | None = None
        self.stepped = 0

    async def start(self, task: Task) -> State:
        return {"heard": []}

    async def step(self, turn: Turn) -> Observation | Done:
        turn.state["heard"].append(turn.text)  # before the wait: an interrupted call must leave no trace
        self.stepped += 1
        if self.stepped == self.hang_at:
            await asyncio.sleep(3600)
        self.steps.append(turn)
        if turn.number >= self._turns:
            return Done()
        return Observation(" ".join(["60"] * turn.number))

    hang_at = 0
    """Number of the call that does not return."""

    async def finish(self, episode: Episode) -> Outcome:
        said = [p.text for p in episode.history if p.speaker == "model"] + [episode.text]
        assert episode.state["heard"] == said[: len(episode.state["heard"])]
        return Outcome(metrics={"heard": float(len(episode.state["heard"]))})


def trajectories(
    serving: Serving,
    environment: Environment,
    settings: RunConfig | None = None,
    cut_at: int | None = None,
    encoder: Callable[[Observation], list[int]] = encode,
) -> Trajectories:
    settings = settings or config()
    engine = ScriptedEngine(serving, settings.data.max_response_length, cut_at)
    host = EnvironmentHost(lambda: environment, settings.environment.step_timeout_s)
    return Trajectories(settings, engine, decode, serving, EnvironmentTurns(host, encoder))


def serving(version: int) -> Serving:
    found = Serving()
    found.resumed(version)
    found.trusted.set()
    return found
