"""Users' reward functions: finding them, calling them, reading what they return."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.rewards import RewardError, RewardFunction, load_reward, parse_score
from headrace.rewards.function import bind_arguments

ARGS = ("source", "an answer", "the truth", {"finish_reason": "stop"})


@pytest.fixture
def user(tmp_path: Path) -> Callable[[str], RewardFunction]:
    """Loads `compute_score` from a file with the given text."""

    def load(text: str) -> RewardFunction:
        path = tmp_path / "user_reward.py"
        path.write_text(textwrap.dedent(text))
        return load_reward(str(path), "compute_score")

    return load


# ---- loading ----


def test_a_file(user: Callable[[str], RewardFunction]) -> None:
    function = user(
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return float(solution_str == ground_truth)
        """
    )
    assert function("s", "x", "x", {}) == 1.0


def test_an_importable_module() -> None:
    assert callable(load_reward("headrace.demo.reward", "compute_score"))


def test_a_file_may_define_classes_that_look_up_their_module(user: Callable[[str], RewardFunction]) -> None:
    """dataclasses and pickle need the module in sys.modules while it is executed."""
    function = user(
        """
        from __future__ import annotations
        import dataclasses

        @dataclasses.dataclass
        class Result:
            score: float

        def compute_score(*args):
            return Result(0.5).score
        """
    )
    assert function(*ARGS) == 0.5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import does_not_exist_anywhere", "does not import: ModuleNotFoundError"),
        ("def compute_score(:", "does not import: SyntaxError"),
        ("\n\nraise RuntimeError('no key')", "RuntimeError('no key') (line 3)"),
        ("x = 1", "no function 'compute_score'"),
        ("compute_score = 3", "no function 'compute_score'"),
        ("def compute_score(a, b, c): ...", "must accept"),
        ("def compute_score(a, b, c, d, e): ...", "must accept"),
        (
            "def compute_score(data_source, answer, truth, extra_info): ...",
            "missing a required argument: 'answer'",
        ),
        ("def compute_score(*, data_source, solution, truth, extra_info): ...", "must accept"),
    ],
)
def test_what_cannot_be_loaded_says_why(user: Callable[[str], RewardFunction], text: str, told: str) -> None:
    with pytest.raises(RewardError, match="custom_reward_function") as caught:
        user(text)
    assert told in str(caught.value)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="does not exist"):
        load_reward(str(tmp_path / "none.py"), "compute_score")


def test_a_module_that_does_not_exist() -> None:
    with pytest.raises(RewardError, match="does not import: ModuleNotFoundError"):
        load_reward("headrace.no_such_module", "compute_score")


def test_a_builtin_without_a_signature() -> None:
    with pytest.raises(RewardError):
        load_reward("builtins", "max")


def test_arguments_are_matched_by_name(user: Callable[[str], RewardFunction]) -> None:
    """A function of verl's with the same names in another order must not get them mixed up."""
    function = user(
        """
        def compute_score(solution_str, ground_truth, data_source, extra_info=None):
            return float(solution_str == ground_truth)
        """
    )
    call = bind_arguments(function, "source", "same", "same", {})
    assert function(*call.args, **call.kwargs) == 1.0


@pytest.mark.parametrize(
    "parameters",
    [
        "solution_str, ground_truth, method='strict', format_score=0.0, score=1.0",
        "solution_str, ground_truth, **kwargs",
        "ground_truth, *, solution_str",
        "**kwargs",
        "*args, **kwargs",
        "source, solution_str, ground_truth, extra_info, /",
    ],
)
def test_whoever_has_verl_s_names_gets_what_they_name(
    user: Callable[[str], RewardFunction], parameters: str
) -> None:
    """verl calls by name: a function that takes fewer, or the rest as keywords, works there."""
    function = user(
        f"""
        def compute_score({parameters}):
            taken = locals().get("kwargs", {{}}) | locals()
            return taken["solution_str"], taken["ground_truth"]
        """
    )
    call = bind_arguments(function, *ARGS)
    assert function(*call.args, **call.kwargs) == ("an answer", "the truth")


@pytest.mark.parametrize("parameters", ["a, b, c, d", "a, b, c, d=None, **kwargs", "a, *rest"])
def test_other_names_are_given_by_position(user: Callable[[str], RewardFunction], parameters: str) -> None:
    function = user(f"def compute_score({parameters}): return locals()")
    call = bind_arguments(function, *ARGS)
    assert call.args == ARGS


# ---- results ----


@pytest.mark.parametrize(
    ("result", "score", "parts"),
    [
        (1, 1.0, {}),
        (-0.5, -0.5, {}),
        (True, 1.0, {}),
        ({"score": 0.25}, 0.25, {}),
        ({"score": 1, "format": 0.5, "ok": True}, 1.0, {"format": 0.5, "ok": 1.0}),
        ({"score": 1, "half\ud83d": 2}, 1.0, {"half\\ud83d": 2.0}),
        ({"score": 1, "text": "x", "none": None, "bad": math.nan}, 1.0, {}),
    ],
)
def test_results(result: Any, score: float, parts: dict[str, float]) -> None:
    assert parse_score(result) == (score, parts)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "None, which is no number"),
        ("good", "'good', which is no number"),
        ([1.0], "no number"),
        ({}, "without 'score'"),
        ({"reward": 1.0, "acc": 1}, r"keys \['acc', 'reward'\]"),
        ({"score": None}, "None, which is no number"),
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        ({"score": -math.inf}, "returned -inf"),
    ],
)
def test_what_is_no_result(result: Any, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        parse_score(result)


@pytest.mark.parametrize(
    "result",
    [10**400, {"score": 1.0, "huge": 10**400}, {1: 0.5, "reward": 1.0}],
    ids=["huge", "part", "keys"],
)
def test_odd_results_end_in_a_score_or_a_reward_error(result: Any) -> None:
    try:
        score, _ = parse_score(result)
    except RewardError:
        return
    assert math.isfinite(score)
