"""Rules of who computes what, against brute force."""

from __future__ import annotations

import itertools
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ledger.replies import Claimed
from headrace_trainer.model.plan import assign, micro_batches, mini_batches, order


def items_of(tokens: list[int]) -> list[Claimed]:
    """Distinct ids, in an order that is neither theirs nor that of their tokens."""
    ids = [f"{(7 * i + 3) % len(tokens) if len(tokens) % 7 else i:010d}" for i in range(len(tokens))]
    return [Claimed(i, 1, 0, 0, n) for i, n in zip(ids, tokens, strict=True)]


batches = st.lists(st.integers(1, 50), max_size=40).map(items_of)


def loads(shares: list[list[Claimed]]) -> list[int]:
    return [sum(i.tokens for i in share) for share in shares]


def best_largest_load(tokens: list[int], ranks: int) -> int:
    return min(
        max(sum(n for n, r in zip(tokens, where, strict=True) if r == rank) for rank in range(ranks))
        for where in itertools.product(range(ranks), repeat=len(tokens))
    )


@given(batches, st.integers(1, 8))
def test_each_sample_goes_to_exactly_one_rank(items: list[Claimed], ranks: int) -> None:
    shares = assign(items, ranks)
    assert len(shares) == ranks
    assert sorted(i.sample_id for share in shares for i in share) == sorted(i.sample_id for i in items)
    place = {i.sample_id: n for n, i in enumerate(items)}
    for share in shares:
        assert [place[i.sample_id] for i in share] == sorted(place[i.sample_id] for i in share)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_no_load_is_above_four_thirds_of_the_best(tokens: list[int], ranks: int) -> None:
    worst = max(loads(assign(items_of(tokens), ranks)))
    assert worst <= Fraction(4, 3) * best_largest_load(tokens, ranks)


def test_the_bound_is_met_where_first_come_first_served_fails_it() -> None:
    """Four equal short samples, then a long one: only longest-first gives the long one a rank of its own."""
    assert sorted(loads(assign(items_of([1, 1, 1, 1, 4]), 2))) == [4, 4]
    assert sorted(loads(assign(items_of([5, 5, 4, 4, 3, 3, 3]), 3))) == [
        8,
        8,
        11,
    ]  # Graham's worst case: 11/9


@given(st.lists(st.integers(1, 5), max_size=20).map(items_of), st.integers(1, 4), st.randoms())
def test_every_rank_computes_the_same_plan(items: list[Claimed], ranks: int, random: object) -> None:
    """The same samples always meet the same fate, also when they were claimed in another order."""
    shuffled = list(items)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(items, ranks) == assign(list(items), ranks)
    assert [{i.sample_id for i in share} for share in assign(items, ranks)] == [
        {i.sample_id for i in share} for share in assign(shuffled, ranks)
    ]


def test_more_ranks_than_samples() -> None:
    assert loads(assign(items_of([3, 5]), 4)) == [5, 3, 0, 0]
    assert assign([], 2) == [[], []]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_trajectory_once_within_the_limit(lengths: list[int], limit: int) -> None:
    cuts = micro_batches(lengths, limit)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in cut) <= limit or len(cut) == 1 for cut in cuts)
    assert cuts == micro_batches(list(lengths), limit)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_micro_batches_are_not_cut_without_need(lengths: list[int], limit: int) -> None:
    """No two could be one, so more than half of every micro-batch's tokens are used, but of the last's."""
    filled = [sum(lengths[i] for i in cut) for cut in micro_batches(lengths, limit)]
    assert all(a + b > limit for a, b in itertools.combinations(filled, 2))


def test_micro_batches_by_example() -> None:
    assert micro_batches([2, 9, 4, 4], 8) == [[1], [2, 3], [0]], "9 is over the limit: alone"
    assert micro_batches([5, 5], 10) == [[0, 1]], "the limit itself fits"
    assert micro_batches([], 8) == []
    assert micro_batches([3, 8, 4], 100) == [[1, 2, 0]], "nothing is padded: lengths may differ"


@given(batches, st.integers(1, 10))
def test_mini_batches_are_consecutive(items: list[Claimed], size: int) -> None:
    cut = mini_batches(items, size)
    assert [i for part in cut for i in part] == items
    assert all(len(part) == size for part in cut[:-1])
    assert all(0 < len(part) <= size for part in cut)


@given(batches)
def test_order_is_by_id_only_when_strict(items: list[Claimed]) -> None:
    assert order(items, strict=False) == items
    strict = order(items, strict=True)
    assert strict == sorted(items, key=lambda i: i.sample_id)
    assert strict == order(items[::-1], strict=True)
