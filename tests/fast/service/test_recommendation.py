"""The recommended number of rollouters: direction, limits, hysteresis, and where it comes to rest."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.config.kubernetes import RecommendationConfig
from headrace.service.recommendation import Advice, WindowReading, advise, decode, direction, encode, wanted

ratios = st.floats(0, 1)
readings = st.builds(WindowReading, ratios, ratios, st.integers(0, 12))
configs = st.builds(
    lambda low, more, tolerance, windows: RecommendationConfig(
        min_rollouters=low, max_rollouters=low + more, tolerance=tolerance, windows=windows
    ),
    st.integers(0, 4),
    st.integers(1, 30),
    st.floats(0.05, 0.5),
    st.integers(1, 4),
)


def follow(c: RecommendationConfig, seen: list[WindowReading], step_s: float = 60.0) -> list[Advice]:
    """The advice after each window, one per `step_s`."""
    out: list[Advice] = []
    for number, reading in enumerate(seen):
        out.append(advise(c, out[-1] if out else None, reading, number * step_s))
    return out


@given(ratios, ratios, ratios, st.integers(1, 50))
def test_rollouters_are_producers(trainer: float, rollouter: float, other: float, there: int) -> None:
    """More idle trainer never means fewer of them, more idle rollouters never mean more."""
    low, high = sorted((trainer, other))
    assert wanted(WindowReading(low, rollouter, there)) <= wanted(WindowReading(high, rollouter, there))
    low, high = sorted((rollouter, other))
    assert wanted(WindowReading(trainer, high, there)) <= wanted(WindowReading(trainer, low, there))


@given(configs, st.lists(readings, min_size=1, max_size=30))
def test_within_the_limits_and_one_step_down_at_a_time(
    c: RecommendationConfig, seen: list[WindowReading]
) -> None:
    advice = follow(c, seen)
    for one in advice:
        assert c.min_rollouters <= one.rollouters <= c.max_rollouters
    downs = [one.lowered_at for one in advice if one.lowered_at > -math.inf]
    assert all(b == a or b - a >= c.down_interval_s for a, b in pairwise(downs))


@given(configs, st.lists(readings, min_size=2, max_size=30))
def test_it_changes_only_when_windows_agree(c: RecommendationConfig, seen: list[WindowReading]) -> None:
    advice = follow(c, seen)
    for number in range(1, len(seen)):
        if advice[number].rollouters == advice[number - 1].rollouters or seen[number].rollouters == 0:
            continue
        last = [r for r in seen[: number + 1] if r.rollouters > 0][-c.windows :]
        assert len(last) == c.windows
        assert len({direction(c, r) for r in last}) == 1


@given(configs, st.integers(0, 2**32))
def test_noise_around_balance_changes_nothing(c: RecommendationConfig, seed: int) -> None:
    c = c.model_copy(update={"min_rollouters": 1, "max_rollouters": 20})
    rng, small = random.Random(seed), c.tolerance / 3
    seen = [WindowReading(rng.uniform(0, small), rng.uniform(0, small), 6) for _ in range(40)]
    assert {one.rollouters for one in follow(c, seen)} == {6}


@given(st.floats(0.5, 20), st.integers(1, 24), st.integers(0, 2**32))
def test_a_run_that_obeys_comes_to_rest_near_what_it_needs(need: float, start: int, seed: int) -> None:
    """With fewer than it needs the trainer waits for its share, with more the rollouters do."""
    c, rng, there = RecommendationConfig(max_rollouters=40), random.Random(seed), start
    last: Advice | None = None
    path: list[int] = []
    for number in range(400):
        trainer = max(0.0, 1 - there / need) + rng.uniform(0, 0.03)
        rollouter = max(0.0, 1 - need / there) + rng.uniform(0, 0.03)
        last = advise(c, last, WindowReading(min(1, trainer), min(1, rollouter), there), number * 120.0)
        there = last.rollouters
        path.append(there)
    rest = path[-1]
    late = path[-100:]
    # At the edge of the tolerance a last step may come late, but none back.
    assert late in (sorted(late), sorted(late, reverse=True)), f"it goes to and fro: {late}"
    assert need * (1 - 2 * c.tolerance) <= rest <= max(1, need * (1 + 2 * c.tolerance), need + 1.5)
    ups = sum(b > a for a, b in pairwise(path))
    downs = sum(b < a for a, b in pairwise(path))
    assert min(ups, downs) <= 1, f"overshot more than once: {path}"


def test_each_case_says_why() -> None:
    c = RecommendationConfig(windows=1)
    cases = {
        "the trainer waits for samples": (WindowReading(0.6, 0.0, 2), 4),
        "rollouters are idle": (WindowReading(0.0, 0.6, 4), 3),
        "both wait: look at the sync and the reward": (WindowReading(0.5, 0.5, 4), 4),
        "balanced": (WindowReading(0.05, 0.05, 4), 4),
        "nobody generates": (WindowReading(1.0, 0.0, 0), 1),
    }
    for why, (reading, rollouters) in cases.items():
        found = advise(c, None, reading, 0.0)
        assert (found.why, found.rollouters) == (why, rollouters)
    again = advise(c, replace(advise(c, None, WindowReading(0, 0.6, 4), 0.0)), WindowReading(0, 0.6, 3), 60.0)
    assert again.rollouters == 3, "the next step down has to wait"
    assert advise(c, again, WindowReading(0, 0.6, 3), 700.0).rollouters == 2


def test_what_is_kept_in_redis() -> None:
    advice = advise(RecommendationConfig(windows=1), None, WindowReading(0.6, 0.0, 2), 0.0)
    found = decode(encode(advice))
    assert found is not None
    assert (found["rollouters"], found["window"]["trainer_idle"]) == (4, 0.6)
    assert decode(None) is decode(b"{") is decode(b"[]") is None


def test_an_advice_of_another_version_is_read_as_far_as_it_goes() -> None:
    found = decode(b'{"rollouters": 3, "mood": [1]}')
    assert found is not None
    assert (found["rollouters"], found["why"]) == (3, "not told")
    for odd in (b"", b"{}", b'{"rollouters": "many"}', b'{"rollouters": true}', b"[" * 100_000, b"\xff"):
        assert decode(odd) is None
