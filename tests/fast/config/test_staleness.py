"""The gate's arithmetic, the derived mode and the largest version gap."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.staleness import Mode, StalenessRule, derive_mode


def of(threshold: float, window: tuple[int, int, int] = (1, 1, 10), partial: bool = False) -> StalenessRule:
    return StalenessRule(*window, threshold, partial)


rules = st.builds(
    StalenessRule,
    sync_steps=st.integers(1, 8),
    require_batches=st.integers(1, 8),
    mini_batch=st.integers(1, 512),
    threshold=st.decimals(0, 64, places=4).map(float) | st.floats(0, 64),
    partial_rollout=st.booleans(),
)


@pytest.mark.parametrize(
    ("threshold", "window", "required"),
    [
        (0.0, (1, 1, 10), 10),
        (0.1, (1, 1, 10), 11),
        (0.3, (1, 1, 10), 13),
        (0.7, (1, 1, 10), 17),  # 0.7 * 10 is 7.000000000000001 in no rounding, but 0.07 * 100 is
        (0.07, (1, 1, 100), 107),
        (0.29, (1, 1, 100), 129),  # binary: 28.999999999999996
        (0.57, (1, 1, 100), 157),  # binary: 56.99999999999999
        (1.1, (1, 1, 10), 21),
        (0.05, (1, 1, 10), 10),  # eta * B < 1: nothing beyond the window
        (0.19, (1, 1, 10), 11),
        (0.5, (4, 2, 16), 192),
        (1.0, (1, 1, 8), 16),
        (2.5, (1, 1, 3), 10),
    ],
)
def test_max_required(threshold: float, window: tuple[int, int, int], required: int) -> None:
    assert of(threshold, window).max_required == required


def test_the_examples_are_hard_for_binary_floating_point() -> None:
    assert math.floor(0.29 * 100) == 28
    assert math.floor(0.57 * 100) == 56


@given(rules)
def test_max_required_is_the_formula(rule: StalenessRule) -> None:
    """B + floor(eta * B), with eta as it is written in decimal."""
    window = rule.sync_steps * rule.require_batches * rule.mini_batch
    assert rule.window == window
    assert rule.max_required == window + math.floor(Fraction(repr(rule.threshold)) * window)


@given(rules, st.floats(0, 64))
def test_max_required_never_falls_with_eta(rule: StalenessRule, other: float) -> None:
    changed = StalenessRule(
        rule.sync_steps, rule.require_batches, rule.mini_batch, other, rule.partial_rollout
    )
    low, high = sorted([rule, changed], key=lambda r: r.threshold)
    assert low.window <= low.max_required <= high.max_required


@pytest.mark.parametrize(
    ("sync_steps", "threshold", "partial", "mode"),
    [
        (1, 0.0, False, Mode.ON_POLICY_PIPELINE),
        (1, 0.0, True, Mode.ON_POLICY_PIPELINE),
        (4, 0.0, False, Mode.STREAM_OFF_POLICY),
        (4, 0.0, True, Mode.STREAM_OFF_POLICY),
        (1, 0.5, False, Mode.ASYNC_STALE),
        (4, 0.5, False, Mode.ASYNC_STALE),
        (1, 0.5, True, Mode.ASYNC_PARTIAL),
        (4, 1.0, True, Mode.ASYNC_PARTIAL),
    ],
)
def test_the_mode_is_derived(sync_steps: int, threshold: float, partial: bool, mode: Mode) -> None:
    rule = StalenessRule(sync_steps, 1, 8, threshold, partial)
    assert derive_mode(rule) is mode
    interrupts = rule.finish_through(5) is None
    assert interrupts is (mode is Mode.ASYNC_PARTIAL), "partial_rollout has effect only when eta > 0"


@pytest.mark.parametrize(
    ("threshold", "window", "partial", "gap"),
    [
        (0.0, (1, 1, 8), False, 0),
        (0.0, (4, 1, 8), True, 0),
        (0.1, (1, 1, 8), False, 0),  # eta * B < 1
        (0.1, (1, 1, 8), True, 0),  # as many as the window holds: all are trained when it ends
        (0.125, (1, 1, 8), False, 1),
        (0.5, (1, 1, 8), False, 1),
        (1.0, (1, 1, 8), False, 1),
        (1.01, (1, 1, 8), False, 2),
        (2.0, (1, 1, 8), False, 2),
        (2.5, (2, 2, 8), False, 3),
        (0.5, (1, 1, 8), True, None),
        (3.0, (1, 1, 8), True, None),
    ],
)
def test_the_largest_version_gap(
    threshold: float, window: tuple[int, int, int], partial: bool, gap: int | None
) -> None:
    assert of(threshold, window, partial).largest_gap == gap


@pytest.mark.parametrize(
    ("threshold", "limit", "gap"), [(0.5, 1, 1), (0.5, 2, 2), (1.0, 4, 4), (1.5, 3, 4), (0.05, 3, 0)]
)
def test_a_limit_on_what_work_may_cross(threshold: float, limit: int, gap: int) -> None:
    """K - 1 + ceil(eta); 1 is the same as no partial rollout at all."""
    rule = StalenessRule(1, 1, 8, threshold, True, limit)
    assert rule.largest_gap == gap
    assert rule.finish_through(7) == 7 - limit
    if limit == 1:
        without = StalenessRule(1, 1, 8, threshold, False)
        assert (rule.largest_gap, rule.finish_through(7)) == (without.largest_gap, without.finish_through(7))


@given(rules)
def test_the_gap_bounds_what_the_gate_lets_in(rule: StalenessRule) -> None:
    """The oldest of max_required samples waits for the others: ceil(max_required / B) - 1 windows."""
    gap = rule.largest_gap
    if gap is None:
        assert rule.crosses is None
        return
    assert gap >= math.ceil(Decimal(rule.max_required) / rule.window) - 1
    assert (gap == 0) == (rule.max_required == rule.window)
    assert gap <= math.ceil(Fraction(repr(rule.threshold)))
