"""Several rewards with weights, the built-in ones, and what the configuration permits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config.run import RunConfig
from headrace.data.rows import DataRow, Message
from headrace.local.reward_probe import try_rows
from headrace.rewards import RewardError, Scorer, build_scorer
from headrace.rewards.pool import FunctionPool
from headrace.rewards.prompt import with_prompt
from headrace.rewards.reasoning_gym_score import scoring
from headrace.rewards.scorer import Weighted, add_up
from headrace.rewards.source import Judged
from tests.fast.config.test_config import GOOD
from tests.in_process_reward import InProcess

ARGS = ("source", "an answer", "the truth", {"finish_reason": "stop"})


def scorer(**sources: tuple[Callable[..., Any], float]) -> Scorer:
    return Scorer({name: Weighted(InProcess(f), weight) for name, (f, weight) in sources.items()})


def config(reward: dict[str, Any], path: str | None = None) -> RunConfig:
    data = copy.deepcopy(GOOD)
    data["custom_reward_function"] = {"path": path}
    data["reward"] = reward
    return RunConfig.model_validate(data)


async def test_rewards_are_added_up_and_each_is_a_metric() -> None:
    found = scorer(
        right=(lambda *_: {"score": 1.0, "steps": 3, "pred": "42"}, 1.0), short=(lambda *_: -0.5, 0.2)
    )
    reward, parts = await found.score(*ARGS)
    assert reward == pytest.approx(0.9)
    assert parts == {"right": 1.0, "right/steps": 3.0, "right/pred": 42.0, "short": -0.5}
    assert await found.judge(*ARGS) == (pytest.approx(0.9), "42")


async def test_one_that_fails_fails_the_whole_and_is_named() -> None:
    def broken(*_: Any) -> float:
        raise KeyError("missing")

    found = scorer(right=(lambda *_: 1.0, 1.0), style=(broken, 1.0))
    with pytest.raises(RewardError, match=r"reward\.sources\.style: the reward raised KeyError"):
        await found.score(*ARGS)


def test_a_sum_that_float32_cannot_hold() -> None:
    with pytest.raises(RewardError, match="weighted sum"):
        add_up({"a": Judged(3e38, {}, None)}, {"a": 10.0})


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "path", "told"),
    [
        ({}, None, "there is no reward: set custom_reward_function.path"),
        ({"sources": {"a": {"kind": "math_verify"}}}, "r.py", "both set: leave one out"),
        ({"sources": {"a": {"kind": "function"}}}, None, "reward.sources.a: kind function needs a path"),
        ({"sources": {"a": {"kind": "http"}}}, None, "reward.sources.a: kind http needs a url"),
        ({"sources": {"a": {"kind": "http", "url": "judge:80"}}}, None, "must start with http://"),
        ({"sources": {"a": {"kind": "http", "url": "http://"}}}, None, "must start with http://"),
        ({"sources": {"a": {"kind": "http", "url": "http://[::1"}}}, None, "sources.a.url is no address"),
        ({"sources": {"a": {"kind": "http", "url": "http://j:999999"}}}, None, "a.url is no address"),
        ({"sources": {"a": {"kind": "http", "url": "http://j:port"}}}, None, "a.url is no address"),
        ({"sources": {"a": {"kind": "http", "url": "http://j/\n"}}}, None, "holds a blank"),
        (
            {"sources": {"a": {"kind": "http", "url": "http://user:hunter2@judge"}}},
            None,
            "put a token into an environment variable",
        ),
        (
            {"sources": {"a": {"kind": "math_verify", "url": "http://judge"}}},
            None,
            "reward.sources.a.url is for kind http or reward_model, not math_verify: leave it out",
        ),
        (
            {"sources": {"a": {"kind": "http", "url": "http://judge", "endpoint": "score"}}},
            None,
            "reward.sources.a.endpoint is for kind reward_model, not http",
        ),
        ({"sources": {"a/b": {"kind": "math_verify"}}}, None, "use letters, digits"),
        ({"sources": {"score": {"kind": "math_verify"}}}, None, "take another name"),
        ({"overlong_buffer": {"enable": True}}, "r.py", "reward.overlong_buffer.len = 0 must lie between 1"),
        ({"overlong_buffer": {"enable": True, "len": 65}}, "r.py", "data.max_response_length = 64"),
        ({"overlong_buffer": {"len": 8}}, "r.py", "the penalty is off: set reward.overlong_buffer.enable"),
    ],
)
def test_what_does_not_fit_together(reward: dict[str, Any], path: str | None, told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(reward, path)
    assert told in str(caught.value)
    (problem,) = caught.value.errors()
    assert "hunter2" not in problem["msg"]


def test_what_is_built() -> None:
    whole = config({}, "r.py")
    (only,) = build_scorer(whole)._sources.values()
    assert isinstance(only.source, FunctionPool)
    assert (only.source.path, only.source.timeout_s, only.weight) == ("r.py", 30.0, 1.0)
    assert not whole.reward.needs_prompt
    several = config(
        {
            "max_processes": 2,
            "sources": {
                "right": {"kind": "math_verify"},
                "style": {"kind": "function", "path": "s.py", "name": "style", "weight": 0.5, "timeout_s": 5},
                "judge": {"kind": "http", "url": "http://judge/score", "concurrency": 2},
                "taste": {"kind": "reward_model", "url": "http://rm:8000", "model": "rm", "weight": 0.1},
            },
        }
    )
    sources = build_scorer(several)._sources
    assert {name: w.weight for name, w in sources.items()} == {
        "right": 1.0,
        "style": 0.5,
        "judge": 1.0,
        "taste": 0.1,
    }
    style = sources["style"].source
    assert isinstance(style, FunctionPool)
    assert (style.name, style.timeout_s, style.max_processes) == ("style", 5.0, 2)
    assert several.reward.needs_prompt
    assert RunConfig.model_validate(several.to_plain()) == several, "as the services read it"


def row(prompt: str | tuple[Message, ...], truth: str, **extra: Any) -> DataRow:
    return DataRow(0, "f", 1, prompt, "source", truth, None, extra)


def test_the_prompt_is_given_as_it_was_written() -> None:
    assert with_prompt(row("1 + 1 =", "2", level=3)) == {"level": 3, "prompt": "1 + 1 ="}
    chat = (Message("system", "Be brief."), Message("user", "1 + 1 ="))
    assert with_prompt(row(chat, "2"))["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 ="},
    ]


# -- built in -------------------------------------------------------------------------------------

ENTRY = {"question": "What is 17 + 25?", "answer": "42", "metadata": {}}


def test_built_in_rewards_score_real_rows() -> None:
    """Both at once, each in its process, through what a validation of the configuration calls."""
    pytest.importorskip("math_verify")
    c = config(
        {"sources": {"gym": {"kind": "reasoning_gym"}, "maths": {"kind": "math_verify", "weight": 0.5}}}
    )
    rows = [
        row("What is 17 + 25?", "42", reasoning_gym={"dataset": "chain_sum", "entry": ENTRY}),
        row("What is 17 + 25?", "42"),
        row("What is a half?", r"\frac{1}{2}", reasoning_gym={"dataset": "no_such", "entry": ENTRY}),
    ]
    right, empty, bare, _, unknown, _ = try_rows(c, rows)
    assert (right.solution, right.reward, right.parts["gym"], right.parts["maths"]) == ("42", 1.5, 1.0, 1.0)
    assert empty.reward is not None
    assert empty.reward < 0.1
    assert bare.reward is None
    assert "reward.sources.gym: the reward raised ValueError" in bare.problem
    assert 'needs extra_info["reasoning_gym"]' in bare.problem
    assert "no data set 'no_such'" in unknown.problem


def test_mathematics_is_compared_as_such() -> None:
    compute_score = pytest.importorskip("headrace.rewards.math_verify_score").compute_score
    right = compute_score("s", r"So the answer is $\boxed{0.5}$.", r"\frac{1}{2}", {})
    assert (right["score"], right["parsed"]) == (1.0, 1.0)
    assert compute_score("s", "The answer is 0.25", r"\frac{1}{2}", {})["score"] == 0.0
    assert compute_score("s", "no idea", "42", {}) == {"score": 0.0, "parsed": 0.0, "pred": None}
    with pytest.raises(ValueError, match="cannot read the ground truth"):
        compute_score("s", "42", "", {})


def test_a_data_set_that_needs_what_is_not_there() -> None:
    """The rest of reasoning_gym works without the packages that a few of its data sets need."""
    try:
        import cellpylib  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="game_of_life needs the package cellpylib"):
            scoring("game_of_life")
    assert scoring("chain_sum")("42", ENTRY) == 1.0
