"""Environments: loading, the host that runs them, the calculator, and the tokens of an observation."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headrace.config.environment import EnvironmentConfig
from headrace.environments import Done, Environment, Episode, Observation, Outcome, Passage, State, Task, Turn
from headrace.environments.calculator import Calculator, calculate
from headrace.environments.host import MAX_STATE_BYTES, EnvironmentHost
from headrace.environments.loading import EnvironmentFailed, load_environment
from headrace.local.environment_probe import problems
from tests.support.scripted_turns import config

TASK = Task("0000000001", "6*7", "source", "42", {}, 1)


def turn(text: str, state: State | None = None, number: int = 1) -> Turn:
    return Turn(TASK, number, text, (), state if state is not None else {}, False)


# ---- loading ----


def test_single_turn_needs_no_environment() -> None:
    assert load_environment(EnvironmentConfig()) is None


def test_one_of_the_users_own_is_made_with_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from headrace.environments import Done, Environment\n"
        "class Mine(Environment):\n"
        "    def __init__(self, size):\n"
        "        self.size = size\n"
        "    async def step(self, turn):\n"
        "        return Done()\n"
    )
    made: Any = load_environment(EnvironmentConfig(path=str(file), name="Mine", kwargs={"size": 3}))
    assert made.size == 3


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        ("import nothing_of_this_name", {}, "environment.path: .*mine.py does not import"),
        ("raise SystemExit(3)", {}, "does not import: SystemExit"),
        ("", {}, "environment.name: .*mine.py has no class or function 'Mine'"),
        ("class Mine: pass", {"kwargs": {"a": 1}}, "environment.kwargs.* raised TypeError"),
        ("class Mine: pass", {}, "has no `async def start`; inherit from headrace.environments.Environment"),
        (
            "from headrace.environments import Environment\n"
            "class Mine(Environment):\n    def step(self, turn): pass",
            {},
            "has no `async def step`",
        ),
    ],
)
def test_one_that_does_not_load_is_named(tmp_path: Path, text: str, settings: Any, told: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    section = EnvironmentConfig(path=str(file), name="Mine", **settings)
    with pytest.raises(EnvironmentFailed, match=told):
        load_environment(section)
    run = config().model_copy(update={"environment": section})
    [problem] = problems(run)
    assert problem.startswith("environment")


def test_the_calculator_passes_the_preflight() -> None:
    assert list(problems(config())) == []


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"name": "calculater"}, "'calculater' is not installed \\(single_turn, calculator are\\)"),
        ({"name": "single_turn", "kwargs": {"a": 1}}, "environment.kwargs are for an environment"),
        ({"step_timeout_s": 60}, "step_timeout_s = 60 is not below sync.drain_stall_s = 60"),
        ({"max_turns": 0}, "max_turns"),
        ({"step_timeout_s": 0}, "step_timeout_s"),
    ],
)
def test_a_section_that_means_nothing_is_refused(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        config(**section)


# ---- the host ----


class Scripted(Environment):
    """`step` runs what the test gives."""

    def __init__(self, step: Any = None, start: Any = None, finish: Any = None) -> None:
        self._step, self._start, self._finish = step, start, finish

    async def start(self, task: Task) -> State:
        return self._start  # type: ignore[no-any-return]

    async def step(self, turn: Turn) -> Observation | Done:
        return await self._step(turn)  # type: ignore[no-any-return]

    async def finish(self, episode: Episode) -> Outcome:
        return self._finish  # type: ignore[no-any-return]


def host(environment: Environment, timeout_s: float = 5.0) -> EnvironmentHost:
    return EnvironmentHost(lambda: environment, timeout_s)


async def test_a_state_is_plain_data_and_comes_back_as_from_another_process() -> None:
    async def step(turn: Turn) -> Done:
        turn.state |= {"tuple": (1, 2), 3: "three"}  # type: ignore[dict-item]
        return Done()

    answer, state = await host(Scripted(step)).step(turn("x"))
    assert answer == Done()
    assert state == {"tuple": [1, 2], "3": "three"}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ([], "must be a dictionary"),
        (None, "must be a dictionary"),
        ({"a": object()}, "no JSON object"),
        ({"a": math.nan}, "no JSON object"),
        ({"a": "x" * MAX_STATE_BYTES}, "keep less in it"),
    ],
)
async def test_a_state_that_could_not_travel_is_refused(state: Any, told: str) -> None:
    with pytest.raises(EnvironmentFailed, match=told):
        await host(Scripted(start=state)).start(TASK)


@pytest.mark.parametrize("answer", [None, "text", Outcome()])
async def test_an_answer_of_another_kind_is_refused(answer: Any) -> None:
    async def step(turn: Turn) -> Any:
        return answer

    with pytest.raises(EnvironmentFailed, match="return an Observation or Done"):
        await host(Scripted(step)).step(turn("x"))


class Unshowable:
    def __repr__(self) -> str:
        raise ValueError("no repr")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Observation(42), "text is 42; give a str"),  # type: ignore[arg-type]
        (Observation(["a"]), r"text is \['a'\]"),  # type: ignore[arg-type]
        (Observation(b"x"), "text is b'x'"),  # type: ignore[arg-type]
        (Observation(None), "text is None"),  # type: ignore[arg-type]
        (Observation(messages=["x"]), "a message of the Observation is 'x'; give a dictionary"),  # type: ignore[list-item]
        (Observation(messages={"role": "tool"}), "messages are {'role': 'tool'}; give a list"),  # type: ignore[arg-type]
        (Observation(messages=42), "messages are 42"),  # type: ignore[arg-type]
        (Observation(messages="words"), "messages are 'words'"),  # type: ignore[arg-type]
        (Unshowable(), "step returned a Unshowable; return an Observation"),
        (Observation(Unshowable()), "text is a Unshowable"),  # type: ignore[arg-type]
    ],
)
async def test_an_observation_of_other_kinds_is_refused(answer: Any, told: str) -> None:
    async def step(turn: Turn) -> Any:
        return answer

    with pytest.raises(EnvironmentFailed, match=told):
        await host(Scripted(step)).step(turn("x"))


async def test_names_of_counts_can_be_encoded() -> None:
    given = Outcome(1.0, {"a\ud83d": 1.0}, {"b\ud800": 2.0})
    found = await host(Scripted(finish=given)).finish(Episode(TASK, 1, "x", (), {}, "stop"))
    assert found == Outcome(1.0, {"a\\ud83d": 1.0}, {"b\\ud800": 2.0})


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (
            Outcome(metrics={"turns": 1}),
            "finish: metrics has turns, which is counted anyhow as env/turns/mean",
        ),
        (Outcome(metrics={Unshowable(): 1}), "finish returned what cannot be read"),  # type: ignore[dict-item]
        (1.0, "return an Outcome"),
        (Outcome(reward=math.nan), "reward is nan"),
        (Outcome(reward="good"), "reward is 'good', which is no number"),  # type: ignore[arg-type]
        (Outcome(metrics={"calls": math.inf}), r"metrics\['calls'\] is inf"),
        (Outcome(metrics=[1]), "metrics is .* must be a dictionary"),  # type: ignore[arg-type]
    ],
)
async def test_an_outcome_of_another_kind_is_refused(outcome: Any, told: str) -> None:
    episode = Episode(TASK, 1, "x", (Passage("model", "y"),), {}, "stop")
    with pytest.raises(EnvironmentFailed, match=told):
        await host(Scripted(finish=outcome)).finish(episode)


async def test_whatever_is_raised_is_told() -> None:
    async def exits(turn: Turn) -> Done:
        raise SystemExit(3)

    async def breaks(turn: Turn) -> Done:
        raise KeyError("no such tool")

    async def cancels(turn: Turn) -> Done:
        raise asyncio.CancelledError

    for step, told in ((exits, "SystemExit"), (breaks, "no such tool"), (cancels, "cancelled itself")):
        with pytest.raises(EnvironmentFailed, match=told):
            await host(Scripted(step)).step(turn("x"))


async def test_a_call_past_its_deadline_is_cancelled_and_the_others_go_on() -> None:
    cancelled = threading.Event()

    async def step(turn: Turn) -> Done:
        if turn.text == "slow":
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()
        return Done()

    runs = host(Scripted(step), 0.2)
    with pytest.raises(EnvironmentFailed, match=r"step took longer than environment.step_timeout_s"):
        await runs.step(turn("slow"))
    assert cancelled.wait(10)
    assert (await runs.step(turn("quick")))[0] == Done()


class Blocking:
    """Makes environments whose step blocks its thread on a turn "block", until `release`."""

    def __init__(self) -> None:
        self.made = 0
        self.entered, self.release = threading.Event(), threading.Event()

    def make(self) -> Scripted:
        self.made += 1
        return Scripted(self._step)

    async def _step(self, turn: Turn) -> Done:
        if turn.text == "block":
            self.entered.set()
            self.release.wait(60)
        return Done()


async def test_one_that_blocks_holds_up_nobody_for_ever() -> None:
    """Neither this loop, nor, after a deadline, the calls that follow."""
    blocking = Blocking()
    runs = EnvironmentHost(blocking.make, 0.2)
    blocked = asyncio.create_task(runs.step(turn("block")))
    assert await asyncio.to_thread(blocking.entered.wait, 10), "the event loop of the caller goes on"
    with pytest.raises(EnvironmentFailed, match="took longer"):
        await blocked
    assert (await runs.step(turn("quick")))[0] == Done()
    assert blocking.made == 2
    blocking.release.set()


async def test_many_calls_behind_one_that_blocks_share_one_fresh_instance() -> None:
    blocking = Blocking()
    runs = EnvironmentHost(blocking.make, 0.2)
    calls = [runs.step(turn("block")), *(runs.step(turn("quick")) for _ in range(20))]
    failed = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(e, EnvironmentFailed) and "took longer" in str(e) for e in failed)
    answers = await asyncio.gather(*(runs.step(turn("quick")) for _ in range(20)))
    assert [answer for answer, _ in answers] == [Done()] * 20
    assert blocking.made == 2
    blocking.release.set()


async def test_a_fresh_instance_that_is_long_in_the_making_holds_no_call_beyond_its_deadline() -> None:
    async def step(turn: Turn) -> Done:
        if turn.text == "block":
            release.wait(60)
        return Done()

    makings = 0
    release, go = threading.Event(), threading.Event()

    def make() -> Scripted:
        nonlocal makings
        makings += 1
        if makings > 1:
            go.wait(60)
        return Scripted(step)

    runs = EnvironmentHost(make, 0.2)
    async with asyncio.timeout(30):
        with pytest.raises(EnvironmentFailed, match="took longer"):
            await runs.step(turn("block"))
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match="no fresh instance yet: its making has not ended"):
                await runs.step(turn("quick"))
        assert makings == 2
        go.set()
        while (answer := await _answer_of(runs)) is None:
            pass
    assert (answer, makings) == (Done(), 2)
    release.set()


async def _answer_of(runs: EnvironmentHost) -> Observation | Done | None:
    try:
        return (await runs.step(turn("quick")))[0]
    except EnvironmentFailed:
        return None


async def test_a_fresh_instance_that_cannot_be_made_is_told_and_made_anew() -> None:
    release, makings = threading.Event(), 0

    async def step(turn: Turn) -> Done:
        if turn.text == "block":
            release.wait(60)
        return Done()

    def make() -> Scripted:
        nonlocal makings
        makings += 1
        if makings == 2:
            raise SystemExit("no memory")
        return Scripted(step)

    runs = EnvironmentHost(make, 0.2)
    with pytest.raises(EnvironmentFailed, match="took longer"):
        await runs.step(turn("block"))
    with pytest.raises(EnvironmentFailed, match=r"its making raised SystemExit\('no memory'\)"):
        await runs.step(turn("quick"))
    assert (await runs.step(turn("quick")))[0] == Done()
    release.set()


# ---- the calculator ----


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        (" 3 - 10 ", "-7"),
        ("-(2+3)*4", "-20"),
        ("1/2", "error"),
        ("2**9", "error"),
        ("", "error"),
        ("1 +", "error"),
        ("1.5*2", "error"),
        ("True+1", "error"),
        ("__import__('os')", "error"),
        ("9" * 31, "error"),
        ("9" * 20 + "*" + "9" * 20, "error"),
        ("1+" * 200 + "1", "error"),
        ("(" * 90 + "1" + ")" * 90, "1"),
        ("\0", "error"),
    ],
)
def test_calculate(expression: str, value: str) -> None:
    assert calculate(expression) == value


async def test_the_calculator_answers_every_call_and_counts() -> None:
    runs = host(Calculator())
    state = await runs.start(TASK)
    answer, state = await runs.step(turn("so <calc>6*7</calc> and <calc>6/7</calc>", state))
    assert answer == Observation("<result>42</result><result>error</result>")
    answer, state = await runs.step(turn("42", state, 2))
    assert answer == Done()
    outcome = await runs.finish(Episode(TASK, 2, "42", (), state, "stop"))
    assert outcome == Outcome(metrics={"tool_calls": 2.0, "tool_errors": 1.0})


async def test_the_calculator_answers_as_a_message_where_a_role_is_given() -> None:
    answer, _ = await host(Calculator(role="tool")).step(
        turn("<calc>6*7</calc>", {"tool_calls": 0, "tool_errors": 0})
    )
    assert answer == Observation(messages=[{"role": "tool", "content": "<result>42</result>"}])


# ---- the documentation's example ----


async def test_the_documented_environment_plays(tmp_path: Path) -> None:
    """As it stands there, with the settings that stand there, until it is found by halving."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "environments.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    sections = [yaml.safe_load(b)["environment"] for b in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    [section] = [s for s in sections if "path" in s]
    (tmp_path / section["path"]).write_text(code)
    settings = EnvironmentConfig.model_validate(section | {"path": str(tmp_path / section["path"])})
    made = load_environment(settings)
    assert made is not None
    runs = host(made)
    state = await runs.start(TASK)
    assert state == await runs.start(TASK), "the seed decides"
    answer, state = await runs.step(turn("forty", state))
    assert answer == Observation(messages=[{"role": "user", "content": "Say a number."}])
    low, high, number = 1, settings.kwargs["highest"], 1
    while answer != Done():
        number += 1
        guess = (low + high) // 2
        answer, state = await runs.step(turn(str(guess), state, number))
        assert number <= settings.max_turns
        if isinstance(answer, Observation):
            low, high = (guess + 1, high) if "higher" in answer.messages[0]["content"] else (low, guess - 1)
    outcome = await runs.finish(Episode(TASK, number, str(guess), (), state, "stop"))
    assert outcome == Outcome(1 / number, {}, {"tool_calls": float(number), "tool_errors": 1.0})
