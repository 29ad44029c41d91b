"""The bound on the version gap as the trainer holds it, and shows it, through a change of eta and S."""

from __future__ import annotations

import pytest

from headrace.staleness import StalenessRule
from headrace_trainer import metrics
from headrace_trainer.window_rule import WindowRule


def shown() -> float:
    return float(metrics.GAP_BOUND._value.get())


def test_the_bound_that_is_shown_is_the_one_that_was_held_against() -> None:
    strict = StalenessRule(
        sync_steps=1, require_batches=1, mini_batch=4, threshold=0.0, partial_rollout=False
    )
    metrics.GAP_BOUND.set(0)
    rule = WindowRule(strict)
    rule.check(0, [0])
    assert shown() == 0
    with pytest.raises(RuntimeError, match="version gap 1 in window 1, the bound is 0"):
        rule.check(1, [0])
    rule.take_up(1, 1, 1.0)
    rule.check(1, [])  # nothing was trained: nothing to say
    assert shown() == 0
    rule.check(3, [2, 3])
    assert shown() >= 1, "an alert compares the largest gap with it"
