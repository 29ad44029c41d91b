"""The reward seam: users' functions of every kind, and everything that they do wrong."""

from __future__ import annotations

import asyncio
import math
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.reward import RewardError, RewardFunction, Scorer, load_reward, parse_score

LONG_S = 60.0
SHORT_S = 0.05
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
        ("raise RuntimeError('no key')", "no key"),
        ("x = 1", "no function 'compute_score'"),
        ("compute_score = 3", "no function 'compute_score'"),
        ("def compute_score(a, b, c): ...", "must accept"),
        ("def compute_score(a, b, c, d, e): ...", "must accept"),
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
    scorer = Scorer(function, LONG_S)
    assert asyncio.run(scorer.score("source", "same", "same", {})) == (1.0, {})


# ---- results ----


@pytest.mark.parametrize(
    ("result", "score", "parts"),
    [
        (1, 1.0, {}),
        (-0.5, -0.5, {}),
        (True, 1.0, {}),
        ({"score": 0.25}, 0.25, {}),
        ({"score": 1, "format": 0.5, "ok": True}, 1.0, {"format": 0.5, "ok": 1.0}),
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


# ---- calls ----


async def test_a_plain_function_runs_off_the_event_loop() -> None:
    threads = []

    def function(source: str, solution: str, truth: str, info: dict[str, Any]) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"score": 0.5, "length": len(solution), "stopped": info["finish_reason"] == "stop"}

    assert await Scorer(function, LONG_S).score(*ARGS) == (0.5, {"length": 9.0, "stopped": 1.0})
    assert threads[0] is not threading.main_thread()


async def test_a_coroutine_runs_on_the_event_loop() -> None:
    loops = []

    async def function(source: str, solution: str, truth: str, info: dict[str, Any]) -> float:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return 0.75

    assert await Scorer(function, LONG_S).score(*ARGS) == (0.75, {})
    assert loops == [asyncio.get_running_loop()]


def raising(*_: Any) -> float:
    raise KeyError("missing field")


async def raising_later(*_: Any) -> float:
    raise KeyError("missing field")


@pytest.mark.parametrize("function", [raising, raising_later])
async def test_a_function_that_raises(function: RewardFunction) -> None:
    with pytest.raises(RewardError, match=r"the reward raised KeyError.'missing field'.") as caught:
        await Scorer(function, LONG_S).score(*ARGS)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_plain_function_that_hangs_is_given_up() -> None:
    release = threading.Event()

    def function(*_: Any) -> float:
        release.wait(LONG_S)
        return 1.0

    try:
        with pytest.raises(RewardError, match=r"took longer than 0\.05 s"):
            await Scorer(function, SHORT_S).score(*ARGS)
    finally:
        release.set()


async def test_a_coroutine_that_hangs_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def function(*_: Any) -> float:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    with pytest.raises(RewardError, match=r"took longer than 0\.05 s"):
        await Scorer(function, SHORT_S).score(*ARGS)
    assert cancelled.is_set()


@pytest.mark.parametrize("result", [math.nan, "high", None, {"reward": 1}])
async def test_a_result_that_is_no_number_is_an_error(result: Any) -> None:
    with pytest.raises(RewardError):
        await Scorer(lambda *_: result, LONG_S).score(*ARGS)


async def test_calls_run_at_once() -> None:
    """Both wait at the barrier: one after the other they would never pass it."""
    barrier = threading.Barrier(2)

    def function(*_: Any) -> float:
        barrier.wait(LONG_S)
        return 1.0

    scorer = Scorer(function, LONG_S)
    assert await asyncio.gather(scorer.score(*ARGS), scorer.score(*ARGS)) == [(1.0, {}), (1.0, {})]


async def test_the_deadline_counts_from_the_start_of_the_call() -> None:
    """Eight trajectories of eight samples finish together; four threads take them in turn."""
    entered, release = threading.Semaphore(0), threading.Semaphore(0)

    def function(*_: Any) -> float:
        entered.release()
        release.acquire(timeout=LONG_S)
        return 1.0

    scorer = Scorer(function, 0.2, threads=1)
    first = asyncio.create_task(scorer.score(*ARGS))
    await asyncio.to_thread(entered.acquire)
    second = asyncio.create_task(scorer.score(*ARGS))  # cannot begin before the first is given up
    try:
        with pytest.raises(RewardError):
            await first
        release.release(2)
        assert await second == (1.0, {})
    finally:
        release.release(2)
        second.cancel()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_timeout_of_the_functions_own_is_told_as_such(asynchronous: bool) -> None:
    def function(*_: Any) -> float:
        raise TimeoutError("judge at 10.0.0.1 does not answer")

    async def later(*_: Any) -> float:
        return function()

    with pytest.raises(RewardError, match=r"judge at 10\.0\.0\.1"):
        await Scorer(later if asynchronous else function, LONG_S).score(*ARGS)
