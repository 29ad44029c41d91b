"""A rollouter's work with an environment: what is finished, failed, parked and validated. Logic alone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headrace.config.run import RunConfig
from headrace.environments import Done, Environment, Episode, Observation, Outcome, Task, Turn
from headrace.environments.host import EnvironmentHost
from headrace.ledger.replies import Taken, TakeReply, TakeStatus
from headrace.v1 import sample_pb2 as pb
from headrace.wire.payloads import FinishReason, Prompt, Sample, decode_parked, decode_sample, encode_prompt
from headrace.wire.sample_checks import SampleReader
from headrace_rollouter.generation.environment_turns import EnvironmentTurns
from headrace_rollouter.generation.work import Worker
from headrace_rollouter.inference.engine import EngineFailed
from tests.in_process_reward import in_process
from tests.support.scripted_turns import PROMPT, VOCABULARY, Counting, ScriptedEngine, config, decode, encode


class Ledger:
    """Hands out one sample, or one held-out row, and remembers what is asked."""

    def __init__(
        self,
        work: bytes | None = None,
        held_out: bool = False,
        rows: tuple[int, ...] = (4,),
        prompt: Prompt = PROMPT,
    ) -> None:
        self._items = [] if held_out else [Taken(PROMPT.sample_id, 1, encode_prompt(prompt), work, 0)]
        self._rows = [(row, encode_prompt(prompt)) for row in rows] if held_out else []
        self.asked: dict[str, tuple[Any, ...]] = {}

    async def run(self, op: Any) -> Any:
        await asyncio.sleep(0)
        if op.script == "take":
            items, self._items = self._items, []
            return TakeReply(TakeStatus.OK if items else TakeStatus.EMPTY, items)
        if op.script == "val_take":
            rows, self._rows = self._rows, []
            return rows
        self.asked[op.script] = op.args
        return "ok"


class Engine(ScriptedEngine):
    async def abort_all(self) -> None:
        pass

    async def check(self) -> None:
        pass


def worker(
    ledger: Ledger,
    environment: Environment,
    settings: RunConfig | None = None,
    reward: Any = lambda *_: 1.0,
    cut_at: int | None = None,
    version: int = 3,
) -> Worker:
    turns = EnvironmentTurns(EnvironmentHost(lambda: environment, 5.0), encode)
    made = Worker(
        settings or config(),
        cast(Any, ledger),
        cast(Any, None),
        in_process(reward),
        decode,
        "owner",
        SampleReader(settings or config(), VOCABULARY),
        environment=turns,  # type: ignore[arg-type]
    )
    engine = Engine(made._state, cut_at=cut_at)
    made._trajectories._engine = engine
    made._engine = made._samples._engine = made._validation._engine = engine  # type: ignore[assignment]
    made.resumed(version)
    made.trusted.set()
    return made


async def until_asked(made: Worker, ledger: Ledger, *scripts: str) -> None:
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(20):
        while not set(scripts) & ledger.asked.keys():
            await asyncio.sleep(0.001)
            assert not running.done(), running.exception()
    made.draining = True
    await asyncio.wait_for(running, 5)


def finished(ledger: Ledger) -> Sample:
    return decode_sample(next(a for a in ledger.asked["finish"] if isinstance(a, bytes)))


async def test_the_reward_function_scores_the_whole_and_knows_the_turns() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def reward(source: str, solution: str, truth: str, info: dict[str, Any]) -> dict[str, float]:
        seen.append((solution, info))
        return {"score": 0.5, "part": 2.0}

    ledger = Ledger()
    await until_asked(worker(ledger, Counting(), reward=reward), ledger, "finish", "fail")
    sample = finished(ledger)
    assert len(sample.trajectories) == 2
    for t, (solution, info) in zip(sample.trajectories, seen, strict=True):
        assert (t.turns, t.reward, t.reward_parts) == (4, 0.5, {"part": 2.0})
        assert t.environment_metrics == {"heard": 4.0}
        assert t.environment_state is None
        assert solution == decode(t.token_ids.tolist())
        last = t.token_ids[t.turn_ends[2] + 3 :].tolist()
        assert info == {"k": [1], "finish_reason": "stop", "num_turns": 4, "last_turn": decode(last)}


async def test_an_environments_own_reward_counts() -> None:
    class Paying(Counting):
        async def finish(self, episode: Episode) -> Outcome:
            return Outcome(episode.turns / 8, {"style": 0.25}, {"calls": 3})

    def never(*_: Any) -> float:
        raise AssertionError("the reward function is not asked")

    ledger = Ledger()
    await until_asked(worker(ledger, Paying(), reward=never), ledger, "finish", "fail")
    for t in finished(ledger).trajectories:
        assert (t.reward, t.reward_parts, t.environment_metrics) == (0.5, {"style": 0.25}, {"calls": 3.0})


async def test_the_greedy_baseline_has_an_environment_too() -> None:
    plain = config().model_dump()
    plain["algorithm"]["adv_estimator"] = "remax"
    ledger = Ledger()
    made = worker(ledger, Counting(), RunConfig.model_validate(plain), lambda *_: 0.75)
    await until_asked(made, ledger, "finish", "fail")
    sample = finished(ledger)
    assert (len(sample.trajectories), sample.baseline_reward) == (2, 0.75)
    engine = made._trajectories._engine
    assert isinstance(engine, ScriptedEngine)
    assert engine.seeds.count(None) == 4, "each turn of the greedy trajectory is greedy"
    assert len({s for s in engine.seeds if s is not None}) == 8, "and every other has a seed of its own"


class Broken(Counting):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    async def start(self, task: Any) -> dict[str, Any]:
        return self._raise("start", await super().start(task))

    async def step(self, turn: Turn) -> Observation | Done:
        return self._raise("step", await super().step(turn))

    async def finish(self, episode: Episode) -> Outcome:
        return self._raise("finish", Outcome())

    def _raise(self, where: str, value: Any) -> Any:
        if where == self._where:
            raise ConnectionError("the tool is away")
        return value


@pytest.mark.parametrize("where", ["start", "step", "finish"])
async def test_an_environment_that_raises_fails_the_sample_with_its_traceback(where: str) -> None:
    ledger = Ledger()
    await until_asked(worker(ledger, Broken(where)), ledger, "finish", "fail")
    _, _, _, reason, detail = ledger.asked["fail"]
    assert reason == "environment_error"
    assert "the tool is away" in detail
    assert f"in {where}" in detail, "the traceback leads into the environment"


@pytest.mark.parametrize("where", ["reward", "environment"])
async def test_an_error_with_half_a_character_fails_the_sample_alone(where: str) -> None:
    """As `json.loads` leaves it: Redis and protobuf refuse such text."""

    class Garbled(Counting):
        async def step(self, turn: Turn) -> Observation | Done:
            raise ValueError("no number: \ud83d")

    def reward(*_: Any) -> float:
        raise ValueError("no number: \ud83d")

    ledger = Ledger()
    made = worker(ledger, Garbled() if where == "environment" else Counting(), reward=reward)
    await until_asked(made, ledger, "finish", "fail")
    _, _, _, reason, detail = ledger.asked["fail"]
    assert reason == f"{where}_error"
    assert "no number: \\ud83d" in detail
    detail.encode()


async def test_names_with_half_a_character_are_kept_in_another_spelling() -> None:
    class Garbled(Counting):
        async def finish(self, episode: Episode) -> Outcome:
            return Outcome(metrics={"calls\ud800": 1.0})

    ledger = Ledger()
    made = worker(ledger, Garbled(), reward=lambda *_: {"score": 1.0, "part\ud83d": 2.0})
    await until_asked(made, ledger, "finish", "fail")
    for t in finished(ledger).trajectories:
        assert (t.reward_parts, t.environment_metrics) == ({"part\\ud83d": 2.0}, {"calls\\ud800": 1.0})


async def test_what_cannot_be_encoded_fails_the_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sample: Sample) -> bytes:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    monkeypatch.setattr("headrace_rollouter.generation.samples.encode_sample", refuse)
    ledger = Ledger()
    await until_asked(worker(ledger, Counting()), ledger, "finish", "fail")
    assert ledger.asked["fail"][3] == "reward_error"


class Seen(Counting):
    """Keeps the seed of each task, at the start and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []
        self.last: list[int] = []

    async def start(self, task: Task) -> dict[str, Any]:
        self.seeds.append(task.seed)
        return await super().start(task)

    async def finish(self, episode: Episode) -> Outcome:
        self.last.append(episode.task.seed)
        return await super().finish(episode)


async def test_a_greedy_trajectorys_environment_draws_too() -> None:
    plain = config().model_dump()
    plain["algorithm"]["adv_estimator"] = "remax"
    seen = []
    for _ in range(2):
        ledger, environment = Ledger(), Seen()
        await until_asked(
            worker(ledger, environment, RunConfig.model_validate(plain)), ledger, "finish", "fail"
        )
        assert len(set(environment.seeds)) == 3, "the greedy one of them has a seed of its own"
        assert 0 not in environment.seeds
        assert sorted(environment.seeds) == sorted(environment.last)
        seen.append(environment.seeds)
    assert seen[0] == seen[1]


async def test_a_drained_group_is_parked_with_its_states_and_ends_elsewhere() -> None:
    """One trajectory has ended, the other has not: the state of the first is still needed for its outcome."""
    whole = Ledger()
    await until_asked(worker(whole, Counting()), whole, "finish")
    expected = finished(whole)

    class Uneven(Counting):
        """The trajectory with the larger seed never gets an answer to its second turn."""

        async def step(self, turn: Turn) -> Observation | Done:
            if turn.number == 2 and turn.task.seed == max(seeds):
                await asyncio.sleep(3600)
            return await super().step(turn)

        async def start(self, task: Any) -> dict[str, Any]:
            seeds.append(task.seed)
            return await super().start(task)

    seeds: list[int] = []
    ledger, environment = Ledger(), Uneven()
    made = worker(ledger, environment)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(20):
        while len(environment.steps) < 4 + 1:
            await asyncio.sleep(0.001)
    await asyncio.wait_for(made.drain(), 10)
    await asyncio.wait_for(running, 5)
    work = next(a for a in ledger.asked["park"] if isinstance(a, bytes))
    group = decode_parked(work)
    assert sorted(t.finish_reason for t in group) == [FinishReason.UNFINISHED, FinishReason.STOP]
    assert all(t.environment_state is not None for t in group)
    partial = config()
    partial.async_training.staleness_threshold, partial.async_training.partial_rollout = 1.0, True
    there = Ledger(work)
    await until_asked(worker(there, Counting(), partial, version=4), there, "finish", "fail")
    for t, other in zip(finished(there).trajectories, expected.trajectories, strict=True):
        assert t.token_ids.tolist() == other.token_ids.tolist()
        assert (t.turn_ends, t.environment_metrics) == (other.turn_ends, other.environment_metrics)


async def test_what_has_only_been_started_is_handed_back() -> None:
    class Waiting(Counting):
        async def start(self, task: Any) -> dict[str, Any]:
            began.set()
            await asyncio.sleep(3600)
            return {}

    import threading

    began = threading.Event()
    ledger = Ledger()
    made = worker(ledger, Waiting())
    running = asyncio.create_task(made.run())
    await asyncio.to_thread(began.wait, 10)
    await asyncio.wait_for(made.drain(), 10)
    await asyncio.wait_for(running, 5)
    assert set(ledger.asked) == {"hand_back"}


async def test_the_environments_answers_are_a_sign_of_life() -> None:
    """A long game without a reward yet must not look like an engine that is stuck."""
    ledger = Ledger()
    made = worker(ledger, Counting())
    await until_asked(made, ledger, "finish", "fail")
    assert made.scored == 2 * (4 + 1)


# ---- validation ----


async def validated(
    environment: Environment, reward: Any = lambda *_: 1.0, prompt: Prompt = PROMPT
) -> pb.ValidationResult | None:
    ledger = Ledger(held_out=True, prompt=prompt)
    made = worker(ledger, environment, reward=reward)
    assert await made._validation.take() == 1
    [task] = made._validation.tasks
    await asyncio.wait_for(task, 10)
    raw = next((a for a in ledger.asked.get("val_finish", ()) if isinstance(a, bytes)), None)
    return pb.ValidationResult.FromString(raw) if raw is not None else None


async def test_validation_has_all_turns() -> None:
    result = await validated(Counting(), lambda *a: {"score": 0.5, "pred": a[3]["last_turn"]})
    assert result is not None
    assert (result.version, result.row, result.reward) == (3, 4, 0.5)
    assert result.answer
    whole = Ledger()
    await until_asked(worker(whole, Counting()), whole, "finish")
    assert result.response_tokens == len(finished(whole).trajectories[0].token_ids)


async def test_validation_takes_the_environments_reward() -> None:
    class Paying(Counting):
        async def finish(self, episode: Episode) -> Outcome:
            return Outcome(reward=0.25)

    result = await validated(Paying())
    assert result is not None
    assert (result.reward, bool(result.answer)) == (0.25, True)


@pytest.mark.parametrize("where", ["start", "step", "finish"])
async def test_a_held_out_row_ends_also_with_an_environment_that_raises(where: str) -> None:
    result = await validated(Broken(where))
    assert result is not None
    assert (result.reward, result.answer) == (0.0, "")


async def test_a_held_out_row_ends_whatever_an_observation_makes_go_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(observation: Observation) -> list[int]:
        raise TypeError("no tokens of that")

    monkeypatch.setattr("tests.fast.rollouter.test_environment_work.encode", broken)
    result = await validated(Counting())
    assert result is not None
    assert (result.reward, result.answer) == (0.0, "")


async def test_an_answer_with_half_a_character_can_be_told() -> None:
    result = await validated(Counting(), lambda *_: {"score": 0.5, "pred": "no \ud83d"})
    assert result is not None
    assert (result.reward, result.answer) == (0.5, "no \\ud83d")


async def test_a_dead_engine_is_not_a_held_out_rows_fault_and_ends_the_work() -> None:
    class Dead(Engine):
        async def check(self) -> None:
            raise EngineFailed("the engine does not answer")

    ledger = Ledger(held_out=True)
    made = worker(ledger, Broken("step"))
    made._validation._engine = Dead(made._state)  # type: ignore[assignment]
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(made.run(), 10)
    assert "val_finish" not in ledger.asked


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_each_held_out_row_has_an_environment_of_its_own_at_every_version(temperature: float) -> None:
    """Rows 4 and 5 ask the same prompt, as with `val.n`."""
    plain = config().model_dump()
    plain["val"]["temperature"] = temperature
    seen = []
    for version in (3, 7):
        ledger, environment = Ledger(held_out=True, rows=(4, 5)), Seen()
        made = worker(ledger, environment, RunConfig.model_validate(plain), version=version)
        await made._validation.take()
        await asyncio.wait_for(asyncio.gather(*made._validation.tasks), 10)
        assert sorted(environment.seeds) == sorted(environment.last)
        assert len(set(environment.seeds)) == 2
        assert 0 not in environment.seeds
        seen.append(sorted(environment.seeds))
    assert seen[0] == seen[1]


async def test_a_score_never_mixes_the_versions_of_turns() -> None:
    class Overtaken(Counting):
        async def step(self, turn: Turn) -> Observation | Done:
            if turn.number == 2:
                serving.version = 4
            return await super().step(turn)

    ledger = Ledger(held_out=True)
    made = worker(ledger, Overtaken())
    serving = made._state
    await made._validation.take()
    [task] = made._validation.tasks
    await asyncio.wait_for(task, 10)
    assert ledger.asked == {}
