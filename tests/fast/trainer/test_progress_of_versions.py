"""Where a checkpoint stands among the versions, and versions that it knows nothing of."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.ledger.replies import Claimed
from headrace.wire.payloads import FinishReason, Prompt, Sample, Segment, Trajectory
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.model.rows import make_rows
from headrace_trainer.records.run_log import update_gaps

KNOWN = {"0": 0, "1": 4, "2": 8}


@pytest.mark.parametrize(
    ("steps", "committed", "known", "origin"),
    [
        (8, 2, KNOWN, (2, 0)),  # nothing was trained since
        (10, 2, KNOWN, (2, 1)),  # stopped in the middle of a window
        (12, 2, KNOWN, (2, 1)),  # saved at its end
        (8, 1, KNOWN, (1, 1)),  # the round of version 2 was never heard of again
        (9, 1, KNOWN, (1, 2)),
        (8, 9, {**KNOWN, "9": 8}, (2, 1)),  # the ledger has lost what came after
        (0, -1, {}, (0, 0)),  # no checkpoint: the initial weights, which are version 0's
    ],
)
def test_the_version_that_weights_come_after(
    steps: int, committed: int, known: dict[str, int], origin: tuple[int, int]
) -> None:
    assert (
        TrainingProgress(optimizer_steps=steps, version=committed, step_of_version=dict(known)).origin(7)
        == origin
    )


def test_the_first_trainer_of_all_has_no_version_before_it() -> None:
    progress = TrainingProgress()
    assert progress.origin(-1) == (-1, 0)
    progress.count_lost(-1, 4)
    assert progress.step_of_version == {}


def gap(progress: TrainingProgress, version: int, trained: int = 0) -> int:
    """Optimizer steps between the weights of `version` and the present ones, `trained` steps on."""
    item = Claimed("0", 1, version, version, 8)
    (found,) = update_gaps([item], progress.step_of_version, progress.optimizer_steps + trained)
    return found


def test_a_lost_policy_is_as_far_as_the_way_back_from_it() -> None:
    progress = TrainingProgress(optimizer_steps=10, version=2, step_of_version=dict(KNOWN))
    progress.count_lost(4, window_steps=4)
    assert [gap(progress, v) for v in (1, 2, 3, 4)] == [6, 2, 12 - 10, 16 - 10]
    assert gap(progress, 4, trained=3) == 6 + 3
    progress.step_of_version["5"], progress.version = 10, 5  # the first of this path after the loss
    assert progress.origin(7) == (5, 0)


def test_lost_versions_of_a_run_without_a_checkpoint() -> None:
    progress = TrainingProgress()
    progress.count_lost(2, window_steps=4)
    assert [gap(progress, v) for v in (0, 1, 2)] == [0, 4, 8]


def test_the_clock_of_the_proximal_policy_goes_on_over_what_was_lost() -> None:
    progress = TrainingProgress(optimizer_steps=5, version=1, step_of_version={"0": 0, "1": 4})
    progress.count_lost(3, window_steps=4)
    progress.step_of_version["4"] = 5
    ids, ones = np.arange(5, dtype=np.int32), np.ones(5, np.float32)
    segments = [Segment(version, version, version + 1) for version in range(5)]
    answer = Trajectory(ids, -ones, ones.astype(np.uint8), segments, 1.0, FinishReason.STOP)
    prompt = Prompt("0000000000", 0, 0, 0, ids, "s", "t")
    ((row,),) = make_rows([[Sample(prompt, [answer], "a", 1)]], progress.step_of_version)
    assert row.behaviour_steps is not None
    assert row.behaviour_steps.tolist() == [0, 4, 5 - 3, 0, 5], "7 steps ahead would be before the first"
