"""The order of issue is a fixed pure function, of all rows alike and of mixtures."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.feed_order import Mixture, feed_order, prompt_at


@given(st.integers(1, 60), st.integers(0, 2**63), st.booleans(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_issues_every_row_once(n_rows: int, seed: int, shuffle: bool, epoch: int) -> None:
    issued = [prompt_at(epoch * n_rows + place, n_rows, seed, shuffle) for place in range(n_rows)]
    assert {e for e, _ in issued} == {epoch}
    assert Counter(r for _, r in issued) == Counter(range(n_rows))
    if not shuffle:
        assert [r for _, r in issued] == list(range(n_rows))


def test_the_order_is_the_published_one() -> None:
    """Recorded values: a change here would make every retained checkpoint resume on other prompts."""
    assert [prompt_at(i, 8, 7, True)[1] for i in range(16)] == RECORDED
    assert prompt_at(3, 8, 7, True) == prompt_at(3, 8, 7, True)
    assert [prompt_at(i, 8, 8, True)[1] for i in range(8)] != RECORDED[:8]


RECORDED = [7, 4, 3, 5, 1, 2, 0, 6, 4, 1, 2, 5, 3, 7, 6, 0]


@pytest.mark.parametrize(("issue", "n_rows"), [(-1, 3), (0, 0)])
def test_numbers_out_of_range_are_refused(issue: int, n_rows: int) -> None:
    with pytest.raises(ValueError, match=r"start at 0|no rows"):
        prompt_at(issue, n_rows, 0, True)


ENTRIES = st.lists(
    st.tuples(st.integers(1, 12), st.one_of(st.integers(1, 50), st.floats(0.01, 20.0))),
    min_size=1,
    max_size=4,
)


@given(ENTRIES, st.integers(0, 2**63), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_mixture_keeps_its_shares_and_reaches_every_row(
    entries: list[tuple[int, float]], seed: int, shuffle: bool
) -> None:
    sizes, weights = [size for size, _ in entries], [weight for _, weight in entries]
    mixture = Mixture(sizes, weights, seed, shuffle)
    first = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    owner = [number for number, size in enumerate(sizes) for _ in range(size)]
    blocks = min(4, -(-6000 // mixture.block))
    issued = [mixture.at(issue) for issue in range(blocks * mixture.block)]
    for block in range(1, blocks + 1):
        of = Counter(owner[row] for _, row in issued[: block * mixture.block])
        for number, share in enumerate(mixture.shares):
            assert abs(of[number] - block * mixture.block * share) < 1
            assert of[number] >= block - 1, "an entry that is never issued"
    for number, size in enumerate(sizes):
        own = [(epoch, row - first[number]) for epoch, row in issued if owner[row] == number]
        assert [epoch for epoch, _ in own] == [place // size for place in range(len(own))]
        for start in range(
            0, len(own) - size + 1, size
        ):  # every epoch of the entry has each of its rows once
            assert Counter(row for _, row in own[start : start + size]) == Counter(range(size))
        if not shuffle:
            assert [row for _, row in own] == [place % size for place in range(len(own))]
    again = Mixture(sizes, weights, seed, shuffle)
    anywhere = range(len(issued) - 1, -1, -max(1, len(issued) // 40))
    assert [again.at(issue) for issue in anywhere] == [issued[issue] for issue in anywhere], "not pure"


def test_a_mixture_is_the_published_one() -> None:
    """Recorded values, as above."""
    mixture = feed_order([3, 5], [1, 0.5], seed=7, shuffle=True)
    assert [mixture.at(issue) for issue in range(12)] == RECORDED_MIXTURE
    plain = feed_order([3, 5], None, seed=7, shuffle=True)
    assert [plain.at(issue) for issue in range(8)] == [prompt_at(issue, 8, 7, True) for issue in range(8)]


RECORDED_MIXTURE = [
    (0, 3), (0, 5), (0, 0), (0, 2), (0, 4), (0, 1), (1, 0), (1, 2), (1, 1), (2, 0), (0, 7), (2, 2)
]  # fmt: skip


def test_unshuffled_entries_are_spread_evenly() -> None:
    mixture = feed_order([2, 6], [3, 1], seed=0, shuffle=False)
    assert [mixture.at(issue) for issue in range(8)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 3), (2, 1)
    ]  # fmt: skip
    small = Mixture([1, 1], [1, 9999], 0, False)
    assert small.block == 10_000, "a block has a prompt of every entry"
    assert small.shares == [Fraction(1, 10_000), Fraction(9999, 10_000)]


@pytest.mark.parametrize(("sizes", "weights"), [([0, 1], [1, 1]), ([1], [0]), ([], []), ([1, 2], [1])])
def test_a_mixture_needs_rows_and_weights(sizes: list[int], weights: list[float]) -> None:
    with pytest.raises(ValueError, match="each entry needs rows and a weight above 0"):
        Mixture(sizes, weights, 0, True)
    with pytest.raises(ValueError, match="start at 0"):
        Mixture([1], [1], 0, True).at(-1)
