"""Algorithms at their edges: cuts, types, shapes, thresholds, single methods' promises."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.aggregation import Denominators, aggregate, count
from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, AdvantageInput, estimate
from headrace.algorithms.masked import masked_mean
from headrace.algorithms.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInput,
    policy_loss,
)
from headrace.algorithms.registries import AGGREGATIONS
from headrace.algorithms.rejection import REJECTION_CRITERIA
from headrace.algorithms.rollout_correction import RolloutCorrectionConfig, correct_rollout
from headrace.algorithms.shaping import overlong_penalty
from tests.fast.algorithms.algorithm_batches import CORRECTION, advantage_input, batch_of, loss_input

torch.set_num_threads(1)


# ---- the gradient does not depend on the cut ----


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(AGGREGATIONS.names()),
    cuts=st.lists(st.integers(0, 6), min_size=0, max_size=5),
    ranks=st.integers(1, 4),
    padding=st.integers(0, 5),
)
def test_the_gradient_does_not_depend_on_the_cut(
    name: str, cuts: list[int], ranks: int, padding: int
) -> None:
    b = batch_of()
    whole = count(b["mask"], horizon=11.0)

    def gradient(parts: list[slice], d: Denominators, pad: int) -> torch.Tensor:
        leaf = b["now"].clone().requires_grad_()
        total = torch.zeros((), dtype=leaf.dtype)
        for part in parts:
            tensors = {k: x[part] for k, x in b.items()} | {"now": leaf[part]}
            wide = {k: torch.nn.functional.pad(x, (0, pad)) if x.ndim == 2 else x for k, x in tensors.items()}
            losses = policy_loss("ppo", loss_input(wide, log_probs=wide["now"]))
            total = total + aggregate(name, losses.per_token, losses.mask, d)
        (grad,) = torch.autograd.grad(total, leaf)
        # FSDP averages over the ranks.
        return grad / d.data_parallel_size

    edges = [0, *sorted(cuts), len(b["mask"])]
    parts = [slice(a, z) for a, z in pairwise(edges)]
    cut = gradient(parts, replace(whole, data_parallel_size=ranks), padding)
    torch.testing.assert_close(cut, gradient([slice(None)], whole, 0))


def test_nothing_to_train_is_a_loss_of_zero_with_a_gradient() -> None:
    b = batch_of()
    empty = b | {"mask": torch.zeros_like(b["mask"])}
    for name in AGGREGATIONS.names():
        leaf = b["now"].clone().requires_grad_()
        losses = policy_loss("ppo", loss_input(empty, log_probs=leaf))
        loss = aggregate(name, losses.per_token, losses.mask, count(empty["mask"]))
        assert loss.item() == 0.0
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], torch.zeros_like(leaf))


# ---- types, shapes, other edges ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    b = batch_of(dtype)
    for name in ADVANTAGE_ESTIMATORS.names():
        out = estimate(name, advantage_input(b))
        assert (out.advantages.dtype, out.returns.dtype) == (dtype, dtype), name
    for name in POLICY_LOSSES.names():
        losses = policy_loss(name, loss_input(b))
        assert losses.per_token.dtype == dtype, name
        assert all(x.dtype == dtype for x in losses.metrics.values()), name
        for mode in AGGREGATIONS.names():
            assert aggregate(mode, losses.per_token, losses.mask, count(b["mask"])).dtype == dtype
    result = correct_rollout(b["old"], b["behaviour"], b["mask"], CORRECTION)
    assert result.weights is not None
    assert result.weights.dtype == result.mask.dtype == dtype


def test_only_the_current_log_probs_carry_a_gradient() -> None:
    b = batch_of()
    for name in POLICY_LOSSES.names():
        tracked = {k: x.clone().requires_grad_() if x.is_floating_point() else x for k, x in b.items()}
        loss = policy_loss(name, loss_input(tracked, log_probs=tracked["now"])).per_token.sum()
        others = [tracked[k] for k in ("old", "behaviour", "advantages", "weights")]
        gradients = torch.autograd.grad(loss, [tracked["now"], *others], allow_unused=True)
        assert gradients[0] is not None
        assert gradients[1:] == (None,) * len(others)


def test_pass_at_k_pays_the_lead_of_a_lone_best() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.25], [0.6], [0.6], [0.1]])
    batch = AdvantageInput(
        rewards, torch.ones_like(rewards), torch.tensor([0, 0, 0, 1, 1, 1]), norm_by_std=False
    )
    assert estimate("grpo_passk", batch).advantages[:, 0].tolist() == [0.75, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_gdpo_normalises_each_component_on_its_own() -> None:
    """A component of a thousand does not drown one of a thousandth."""
    ids = torch.zeros(4, dtype=torch.int64)
    components = torch.tensor([[1000.0, 0, 0, 0], [0, 1e-3, 1e-3, 0]], dtype=torch.float64)
    rewards = components.sum(0)[:, None]
    batch = AdvantageInput(rewards, torch.ones_like(rewards), ids, reward_components=components)
    swapped = replace(batch, reward_components=components * torch.tensor([[1e-6], [1e6]]))
    torch.testing.assert_close(
        estimate("gdpo", batch).advantages, estimate("gdpo", swapped).advantages, atol=5e-3, rtol=0
    )


def test_tppo_trains_its_window_only_and_sums_over_all() -> None:
    b = batch_of()
    window = torch.zeros_like(b["mask"])
    window[:, 2:4] = 1
    whole = estimate("tppo", advantage_input(b)).advantages
    part = estimate("tppo", advantage_input(b, train_window=window)).advantages
    torch.testing.assert_close(part, whole * window)


def test_the_overlong_penalty_never_pays() -> None:
    lengths = torch.arange(0, 30)
    penalty = overlong_penalty(lengths, 20, 8)
    assert (penalty <= 0).all()
    assert penalty[12] == 0
    assert penalty[20] == -1
    assert (penalty.diff() <= 0).all()


def test_every_criterion_rejects_what_is_far_and_keeps_what_is_near() -> None:
    mask = torch.ones(2, 3)
    log_ratio = torch.tensor([[0.0, 0.01, -0.01], [3.0, 4.0, 3.0]])
    for name in REJECTION_CRITERIA.names():
        config = RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=1.5)
        result = correct_rollout(log_ratio, torch.zeros(2, 3), mask, config)
        assert result.mask.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], name


def test_the_two_signs_of_a_ratio() -> None:
    """k1 bounds engine / trainer, the ratio criteria trainer / engine."""
    log_ratio = torch.full((1, 2), math.log(3.0))
    mask = torch.ones(1, 2)
    for name, threshold, kept in [
        ("token_k1", "0.3_1.1", 1.0),
        ("token_k1", "0.9_4.0", 0.0),
        ("token", "0.9_4.0", 1.0),
        ("token", "0.3_1.1", 0.0),
        ("geometric", "0.9_4.0", 1.0),
        ("sequence", "0.9_4.0", 0.0),
    ]:
        config = RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=threshold)
        result = correct_rollout(log_ratio, torch.zeros(1, 2), mask, config)
        assert result.mask[0, 0] == kept, (name, threshold)


@pytest.mark.parametrize(
    "config",
    [
        {"rollout_is": "token", "rollout_is_threshold": "2.0_1.0"},
        {"rollout_is": "token", "rollout_is_threshold": "-1"},
        {"rollout_is": "token", "rollout_is_threshold": True},
        {"rollout_is": "token", "rollout_is_threshold": "1_2_3"},
        {"rollout_is": "word"},
        {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"},
        {"rollout_rs": "token_k3,token_k1", "rollout_rs_threshold": "0.1,0.2,0.3"},
        {"rollout_rs": "token_k3"},
        {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1.5},
    ],
)
def test_a_correction_that_makes_no_sense_is_refused(config: dict[str, Any]) -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"threshold|bound|unknown|criteri"):
        correct_rollout(x, x, torch.ones(1, 2), RolloutCorrectionConfig(**config))


def test_shapes_that_do_not_fit_are_refused() -> None:
    b = batch_of()
    for name in ("old_log_probs", "advantages", "mask", "behaviour_log_probs"):
        with pytest.raises(ValueError, match=name):
            loss_input(b, **{name: b["old"][:, :-1]})
    for name in ("values", "group_ids", "reward_baselines"):
        with pytest.raises(ValueError, match=name):
            advantage_input(b, **{name: torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match="needs values"):
        estimate("gae", advantage_input(b, values=None))
    assert {f.name for f in fields(PolicyLossInput)} >= {"log_probs", "mask"}


def test_metrics_are_means_over_the_mask() -> None:
    b = batch_of()
    losses = policy_loss("ppo", loss_input(b))
    by_hand = (b["old"] - b["now"])[b["mask"] > 0].mean()
    torch.testing.assert_close(masked_mean(losses.metrics["kl"], losses.mask), by_hand)
