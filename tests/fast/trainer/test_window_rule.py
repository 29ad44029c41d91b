"""The bound on the version gap as the trainer holds it through a change of eta and S."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headrace.config.staleness import StalenessRule
from headrace_trainer.learning.window_rule import WindowRule

STRICT = StalenessRule(sync_steps=1, require_batches=1, mini_batch=4, threshold=0.0, partial_rollout=False)


def test_the_bound_that_is_told_is_the_one_that_was_held_against() -> None:
    rule = WindowRule(STRICT)
    assert rule.check(0, [0]) == 0
    with pytest.raises(RuntimeError, match="version gap 1 in window 1, the bound is 0"):
        rule.check(1, [0])
    rule.take_up(1, 1, 1.0)
    assert rule.check(1, []) == 0, "nothing was trained"
    assert rule.check(3, [2, 3]) >= 1, "an alert compares the largest gap with it"


def test_what_was_kept_of_the_lineage_before_has_the_bound_of_the_rule_it_was_kept_under() -> None:
    rule = WindowRule(replace(STRICT, threshold=1.0))
    rule.resumed(8, kept=6)
    assert rule.check(8, [7]) == 1
    with pytest.raises(RuntimeError, match="version gap 2 in window 9, the bound is 1"):
        rule.check(9, [7])
    rule.take_up(8, 1, 0.0)  # the coordinator knows of another eta than the file
    assert rule.check(9, [7]) == 2, "six before it, four in a window"
    with pytest.raises(RuntimeError, match="version gap 3"):
        rule.check(10, [7])


def test_no_bound_is_told_as_infinity() -> None:
    partial = StalenessRule(sync_steps=1, require_batches=1, mini_batch=4, threshold=1, partial_rollout=True)
    assert WindowRule(partial).check(7, [0]) == math.inf
