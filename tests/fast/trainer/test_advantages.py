"""The loop feeds every estimator what it is defined on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, AdvantageInput, estimate
from headrace.wire.payloads import FinishReason, Sample, Segment
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.advantages import fill_advantages, with_advantages
from headrace_trainer.model.rows import make_rows
from tests.support.learners import NEEDS, config, learn, with_baseline


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_estimator(estimator: str, ranks: Ranks, samples: list[Sample], model_dir: str) -> None:
    c = config(algorithm={"adv_estimator": estimator}, **NEEDS.get(estimator, {}))
    learned, moved = learn(c, ranks, with_baseline(samples, 0.5), model_dir)
    assert np.isfinite(learned.sums.vector()).all()
    assert moved > 0


def by_hand(samples: list[Sample], values: torch.Tensor, **more: Any) -> AdvantageInput:
    """What the estimator should be asked, from the samples alone."""
    every = [(number, t) for number, s in enumerate(samples) for t in s.trajectories]
    width = max(len(t.token_ids) for _, t in every)
    rewards = torch.zeros(len(every), width, dtype=torch.float64)
    mask = torch.zeros(len(every), width)
    for row, (_, t) in enumerate(every):
        mask[row, : len(t.token_ids)] = torch.from_numpy(t.loss_mask.astype("float32"))
        trained = np.flatnonzero(t.loss_mask)
        rewards[row, trained[-1] if len(trained) else len(t.token_ids) - 1] = float(np.float32(t.reward))
    return AdvantageInput(
        token_level_rewards=rewards,
        response_mask=mask,
        group_ids=torch.tensor([number for number, _ in every]),
        lengths=torch.tensor([len(t.token_ids) for _, t in every]),
        values=values[:, :width],
        truncated=torch.tensor([t.finish_reason is FinishReason.LENGTH for _, t in every]),
        reward_baselines=torch.full((len(every),), 0.5, dtype=torch.float64),
        **more,
    )


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_the_loop_feeds_each_estimator_what_it_is_defined_on(
    estimator: str, samples: list[Sample], ranks: Ranks
) -> None:
    """Same numbers as the pure function on a batch put together by hand."""
    cut = [
        dataclasses.replace(
            s,
            baseline_reward=0.5,
            trajectories=[
                dataclasses.replace(
                    t, reward=float(np.float32(t.reward)),
                    finish_reason=FinishReason.LENGTH if i % 2 else FinishReason.STOP,
                )
                for i, t in enumerate(s.trajectories)
            ],
        )
        for s in samples
    ]  # fmt: skip
    a = {"adv_estimator": estimator, "gamma": 0.9, "lam": 0.8}
    c = config(algorithm=a, **NEEDS.get(estimator, {}))
    rows = make_rows([cut[:1], cut[1:]])
    flat = [row for mini in rows for row in mini]
    rng = np.random.default_rng(4)
    values, old, squares = (torch.zeros(len(flat), 20, dtype=torch.float64) for _ in range(3))
    for number, row in enumerate(flat):
        n = len(row.trajectory.token_ids)
        row.values, row.old_log_probs = rng.normal(size=n), -rng.random(n)
        row.sum_pi_squared = rng.random(n)
        for into, array in ((values, row.values), (old, row.old_log_probs), (squares, row.sum_pi_squared)):
            into[number, :n] = torch.from_numpy(array)
    fill_advantages(c, rows, ranks)
    width = max(len(row.trajectory.token_ids) for row in flat)
    expected = estimate(
        estimator,
        by_hand(
            cut, values, gamma=0.9, lam=0.8, old_log_probs=old[:, :width], sum_pi_squared=squares[:, :width]
        ),
    )
    for number, row in enumerate(flat):
        n = len(row.trajectory.token_ids)
        np.testing.assert_allclose(row.advantages, expected.advantages[number, :n], rtol=1e-12, atol=1e-12)
        if c.critic.enable:
            assert row.returns is not None
            np.testing.assert_allclose(row.returns, expected.returns[number, :n], rtol=1e-12, atol=1e-12)


def test_kl_is_taken_off_the_reward_with_its_sign(samples: list[Sample], ranks: Ranks) -> None:
    """remax shows the return itself: r - beta * sum of (old - ref) from each token on."""
    c = config(algorithm={"adv_estimator": "remax", "use_kl_in_reward": True})
    rows = make_rows([with_baseline(samples, 0.0)])
    for row in rows[0]:
        row.ref_log_probs = row.trajectory.log_probs - 0.5
    kl = fill_advantages(c, rows, ranks, kl_coef=0.1)
    assert kl is not None
    assert kl.mean == pytest.approx(0.5)
    for row in rows[0]:
        on = row.trajectory.loss_mask > 0
        left = np.cumsum(on[::-1])[::-1]
        np.testing.assert_allclose(
            row.advantages[on], (row.trajectory.reward - 0.1 * 0.5 * left)[on], rtol=1e-5
        )


def test_remax_takes_off_the_greedy_reward(samples: list[Sample]) -> None:
    c = config(algorithm={"adv_estimator": "remax"})
    (rows,) = with_advantages(c, [with_baseline(samples, 0.25)])
    for row in rows:
        on = row.trajectory.loss_mask > 0
        np.testing.assert_allclose(row.advantages[on], row.trajectory.reward - 0.25, rtol=1e-6)


def test_the_reward_stands_where_something_is_trained(samples: list[Sample]) -> None:
    """A trajectory that ends with tokens of a tool: its last own token still gets the outcome."""
    c = config(algorithm={"adv_estimator": "remax"})
    masked = np.concatenate([np.ones(3, np.uint8), np.zeros(2, np.uint8)])
    t = samples[0].trajectories[0]
    cut = dataclasses.replace(
        t, token_ids=np.arange(5, dtype=np.int32), log_probs=np.zeros(5, np.float32), loss_mask=masked,
        segments=[Segment(0, 0, 5)], reward=1.0,
    )  # fmt: skip
    (rows,) = with_advantages(c, [[dataclasses.replace(samples[0], trajectories=[cut], baseline_reward=0.0)]])
    np.testing.assert_array_equal(rows[0].advantages, [1, 1, 1, 0, 0])


def test_gdpo_normalises_each_part_of_the_reward(samples: list[Sample]) -> None:
    """A part that is a hundred times larger does not drown the other."""
    rng = np.random.default_rng(3)
    parts = [
        dataclasses.replace(
            s,
            trajectories=[
                dataclasses.replace(t, reward_parts={"a": rng.random(), "b": 100 * rng.random()})
                for t in s.trajectories
            ],
        )
        for s in samples
    ]
    small = [
        dataclasses.replace(
            s,
            trajectories=[
                dataclasses.replace(
                    t, reward_parts={"a": t.reward_parts["a"], "b": t.reward_parts["b"] / 100}
                )
                for t in s.trajectories
            ],
        )
        for s in parts
    ]
    c = config(algorithm={"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"]})
    only = config(algorithm={"adv_estimator": "gdpo", "gdpo_reward_keys": ["b"]})
    (large_rows,), (small_rows,) = with_advantages(c, [parts]), with_advantages(c, [small])
    for x, y in zip(large_rows, small_rows, strict=True):
        np.testing.assert_allclose(x.advantages, y.advantages, atol=1e-4)
    (alone,) = with_advantages(only, [parts])
    assert any(not np.allclose(x.advantages, y.advantages) for x, y in zip(large_rows, alone, strict=True))


def test_advantages_are_statistics_of_the_whole_batch(ranks: Ranks, samples: list[Sample]) -> None:
    """Cutting the batch into mini-batches changes nothing, whitening included."""
    c = config(algorithm={"adv_estimator": "reinforce_plus_plus_baseline"})
    (whole,) = with_advantages(c, [samples], ranks)
    halves = with_advantages(c, [samples[:1], samples[1:]], ranks)
    for a, b in zip(whole, [r for half in halves for r in half], strict=True):
        np.testing.assert_array_equal(a.advantages, b.advantages)


def test_overlong_responses_are_punished(samples: list[Sample]) -> None:
    c = config(
        algorithm={"adv_estimator": "reinforce_plus_plus"},
        reward={"overlong_buffer": {"enable": True, "len": 4}},
    )
    plain = config(algorithm={"adv_estimator": "reinforce_plus_plus"})
    (punished,), (free,) = with_advantages(c, [samples]), with_advantages(plain, [samples])
    longest = max(range(len(free)), key=lambda i: free[i].span.stop - free[i].span.start)
    assert len(free[longest].trajectory.token_ids) == 14
    assert punished[longest].advantages[-1] < free[longest].advantages[-1]
