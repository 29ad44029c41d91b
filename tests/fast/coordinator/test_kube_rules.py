"""Deletion costs and Events: what is written to the cluster, and how seldom."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace_coordinator.kube.rules import LARGEST_COST, Aggregator, costs_to_set, deletion_cost
from headrace_coordinator.rounds.roster import replica_of

tokens = st.integers(0, 2**40)


@given(tokens, tokens)
def test_who_has_more_in_flight_never_costs_less(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert 0 <= deletion_cost(low) <= deletion_cost(high) <= LARGEST_COST
    assert (deletion_cost(low) == 0) == (low == 0)
    if high >= 2 * low > 0 and high < LARGEST_COST:
        assert deletion_cost(low) < deletion_cost(high)


@given(st.integers(0, 2**32))
def test_few_patches_and_close_enough(seed: int) -> None:
    """Over an hour in which work comes and goes no pod is patched faster than its interval, and what stands
    there is near the truth whenever the truth stands still."""
    rng, interval = random.Random(seed), 30.0
    there: dict[str, int | None] = {f"pod-{n}": None for n in range(4)}
    have = dict.fromkeys(there, 0)
    at: dict[str, float] = {}
    patches: dict[str, list[float]] = {pod: [] for pod in there}

    def look(now: float) -> None:
        for pod, cost in costs_to_set(there, have, at, now, interval).items():
            there[pod], at[pod] = cost, now
            patches[pod].append(now)

    for step in range(360):
        for pod in have:
            have[pod] = max(0, have[pod] + rng.randint(-400, 400)) if rng.random() < 0.8 else 0
        look(step * 10.0)
    look(3600.0 + interval)
    for pod, times in patches.items():
        assert all(b - a >= interval for a, b in pairwise(times))
        found = there[pod] or 0
        assert (found == 0) == (have[pod] == 0)
        assert have[pod] == 0 or 0.5 <= found / have[pod] <= 2


def test_a_small_change_is_none() -> None:
    assert costs_to_set({"a": deletion_cost(1000)}, {"a": 1100}, {}, 0.0, 30.0) == {}
    assert costs_to_set({"a": deletion_cost(1000)}, {"a": 0}, {}, 0.0, 30.0) == {"a": 0}
    assert costs_to_set({"a": None}, {}, {}, 0.0, 30.0) == {}, "0 is what no annotation means"


def test_repeats_of_an_event_are_counted_not_written() -> None:
    a = Aggregator(window_s=100, interval_s=10, most=2)
    first = a.seen("SyncFailed", "trainer", "one", 0.0)
    assert first is not None
    assert (first.name, first.count) == ("one", 1)
    assert [a.seen("SyncFailed", "trainer", f"n{n}", n * 1.0) for n in range(1, 9)] == [None] * 8
    assert list(a.overdue(9.0)) == []
    (due,) = a.overdue(10.0)
    assert (due.name, due.count) == ("one", 9)
    assert list(a.overdue(30.0)) == [], "nothing new since"
    assert a.seen("ReplicaFenced", "pod", "two", 11.0) is not None
    assert a.seen("ReplicaFenced", "other", "three", 11.0) is None, "no flood of objects"
    again = a.seen("SyncFailed", "trainer", "four", 101.0)
    assert again is not None
    assert (again.name, again.count) == ("four", 1), "after the window it is news again"


def test_pods_and_incarnations() -> None:
    assert replica_of("rollouter-headrace-rollouter-6c9f-x2x4z-1f2e3d4c") == "headrace-rollouter-6c9f-x2x4z"
    assert replica_of("rollouter-0-1f2e3d4c") == "0"
