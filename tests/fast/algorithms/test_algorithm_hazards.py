"""What goes wrong silently in asynchronous RL: each hazard of the pure functions, shown and excluded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.algorithms.aggregation import aggregate, count
from headrace.algorithms.decoupled import approximate_proximal, interpolation_weight
from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, AdvantageInput, estimate
from headrace.algorithms.importance_weights import effective_sample_size, importance_weights, parse_band
from headrace.algorithms.kl import kl_penalty
from headrace.algorithms.log_probs import token_log_probs
from headrace.algorithms.policy_loss import (
    POLICY_LOSSES,
    policy_loss,
)
from headrace.algorithms.registries import AGGREGATIONS, KL_PENALTIES
from headrace.algorithms.rollout_correction import RolloutCorrectionConfig, correct_rollout
from headrace.algorithms.value_loss import clipped_value_loss
from headrace.algorithms.whitening import whiten
from tests.fast.algorithms.algorithm_batches import (
    CORRECTION,
    SETTINGS,
    advantage_input,
    batch_of,
    ess,
    loss_input,
    ppo_sums,
)

torch.set_num_threads(1)

GROUP_METHODS = [
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "pipelinerl",
    "magistral",
    "gdpo",
    "reinforce_plus_plus_baseline",
]
POISON = [math.nan, math.inf, -math.inf]

# ---- 1. equal rewards in floating point ----


@given(
    reward=st.floats(-100, 100, width=32),
    size=st.integers(2, 48),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(reward=0.7, size=7, dtype=torch.float32)
@example(reward=1 / 3, size=11, dtype=torch.bfloat16)
def test_a_group_of_equal_rewards_is_exactly_zero(reward: float, size: int, dtype: torch.dtype) -> None:
    rewards = torch.full((size, 1), reward, dtype=dtype)
    batch = AdvantageInput(rewards, torch.ones_like(rewards), torch.zeros(size, dtype=torch.int64))
    for name in GROUP_METHODS:
        assert torch.equal(estimate(name, batch).advantages, torch.zeros_like(rewards)), name


def test_the_plain_formula_is_not_zero() -> None:
    """Without the explicit test the noise of rounding would be divided by a deviation near zero."""
    groups = [torch.full((n,), r / 10) for n in range(3, 40) for r in range(1, 10)]
    noise = [((g - g.mean()) / (g.std() + 1e-6)).abs().max() for g in groups]
    assert max(noise) > 0.01


def test_equal_values_are_whitened_to_zero() -> None:
    x = torch.full((3, 5), 0.7)
    mask = torch.ones(3, 5)
    assert torch.equal(whiten(x, mask), torch.zeros_like(x))


def test_one_equal_group_does_not_disturb_the_others() -> None:
    rewards = torch.tensor([[0.7], [0.7], [0.7], [1.0], [0.0]])
    ids = torch.tensor([5, 5, 5, 2, 2])
    out = estimate("grpo", AdvantageInput(rewards, torch.ones_like(rewards), ids)).advantages[:, 0]
    assert out[:3].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(out[3:], torch.tensor([0.7071, -0.7071]), atol=1e-4, rtol=0)


# ---- 2. which log-probs are old ----


def test_old_equal_to_current_disables_clipping() -> None:
    b = batch_of()
    disguised = loss_input(b, old_log_probs=b["now"], importance_weights=None)
    honest = loss_input(b, old_log_probs=b["behaviour"] - 1.0, importance_weights=None)
    assert policy_loss("ppo", disguised).metrics["clip_fraction"].sum() == 0
    assert policy_loss("ppo", honest).metrics["clip_fraction"].sum() > 0


def test_the_engines_log_probs_are_old_and_get_no_second_weight() -> None:
    b = batch_of()
    weighted = replace(
        SETTINGS, rollout_correction=RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.1)
    )
    plain = loss_input(b, old_log_probs=b["behaviour"], importance_weights=None)
    bypass = loss_input(b, settings=weighted)
    torch.testing.assert_close(
        policy_loss("bypass_ppo_clip", bypass).per_token, policy_loss("ppo", plain).per_token
    )


# ---- 3. the engine's log-probs are those after temperature ----


def test_log_probs_are_those_after_temperature() -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 11, generator=g)
    tokens = torch.randint(11, (2, 3), generator=g)
    temperature = torch.tensor([[0.7], [1.3]])
    engine = torch.log_softmax(logits / temperature[..., None], -1).gather(-1, tokens[..., None])[..., 0]
    ours, entropy = token_log_probs(logits, tokens, temperature)
    torch.testing.assert_close(ours, engine)
    exact = torch.distributions.Categorical(logits=logits / temperature[..., None])
    torch.testing.assert_close(entropy, exact.entropy())
    raw, _ = token_log_probs(logits, tokens, torch.ones(2, 1))
    assert not torch.allclose(raw, engine, atol=1e-3)


def test_top_k_renormalises_unless_the_kept_set_is_carried() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]])
    kept = torch.tensor([[[True, True, False, False]]])
    cut = logits.masked_fill(~kept, -math.inf)
    engine = torch.log_softmax(cut, -1)[..., 0]
    token, one = torch.tensor([[0]]), torch.ones(1, 1)
    assert not torch.allclose(token_log_probs(logits, token, one)[0], engine, atol=1e-2)
    torch.testing.assert_close(token_log_probs(cut, token, one)[0], engine)
    assert torch.isfinite(token_log_probs(cut, token, one)[1]).all()


# ---- 4. what lies outside the mask ----


def poisoned(b: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
    off = b["mask"] <= 0
    return {
        key: x.masked_fill(off, value) if x.shape == b["mask"].shape and key != "mask" else x
        for key, x in b.items()
    }


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_policy_loss_ignores_what_is_outside_the_mask(name: str) -> None:
    b = batch_of()
    results = []
    for data in (b, *(poisoned(b, value) for value in POISON)):
        leaf = data["now"].clone().requires_grad_()
        losses = policy_loss(name, loss_input(data, log_probs=leaf))
        loss = aggregate("seq-mean-token-mean", losses.per_token, losses.mask, count(b["mask"]))
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.isfinite(loss)
        assert torch.equal(gradient[b["mask"] <= 0], torch.zeros_like(gradient[b["mask"] <= 0]))
        assert all(torch.isfinite(x).all() for x in (losses.metrics | losses.scalars).values())
        results.append((loss, gradient, losses.mask))
    for clean, *dirty in zip(*results, strict=True):
        assert all(torch.equal(clean, one) for one in dirty), dirty


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
def test_an_estimator_ignores_what_is_outside_the_mask(name: str) -> None:
    b = batch_of()
    clean = estimate(name, advantage_input(b))
    off = b["mask"] <= 0
    assert torch.equal(clean.advantages[off], torch.zeros_like(clean.advantages[off]))
    for value in POISON:
        dirty = estimate(name, advantage_input(poisoned(b, value)))
        assert torch.equal(clean.advantages, dirty.advantages), value
        assert torch.equal(clean.returns, dirty.returns), value


@pytest.mark.parametrize("value", POISON)
def test_the_rest_ignores_what_is_outside_the_mask(value: float) -> None:
    b = batch_of()
    dirty = poisoned(b, value)
    mask = b["mask"]
    for name in AGGREGATIONS.names():
        d = count(mask, 9.0)
        assert aggregate(name, b["now"], mask, d) == aggregate(name, dirty["now"], mask, d)
    for name in (*KL_PENALTIES.names(), "k3+"):
        leaf = dirty["now"].clone().requires_grad_()
        kl = kl_penalty(name, leaf, dirty["old"], mask)
        assert torch.equal(kl, kl_penalty(name, b["now"], b["old"], mask))
        assert torch.isfinite(torch.autograd.grad(kl.sum(), leaf)[0]).all()
    ours = correct_rollout(dirty["old"], dirty["behaviour"], mask, CORRECTION)
    theirs = correct_rollout(b["old"], b["behaviour"], mask, CORRECTION)
    assert ours.weights is not None
    assert theirs.weights is not None
    assert torch.equal(ours.weights, theirs.weights)
    assert torch.equal(ours.mask, theirs.mask)
    assert ours.metrics == theirs.metrics
    leaf = dirty["now"].clone().requires_grad_()
    value_losses, _ = clipped_value_loss(leaf, dirty["values"], dirty["rewards"], mask, 0.2)
    assert torch.equal(value_losses, clipped_value_loss(b["now"], b["values"], b["rewards"], mask, 0.2)[0])
    assert torch.isfinite(torch.autograd.grad(value_losses.sum(), leaf)[0]).all()
    leaf = dirty["now"].clone().requires_grad_()
    sums = ppo_sums(leaf, dirty["old"], dirty["advantages"], mask)
    clean = ppo_sums(b["now"], b["old"], b["advantages"], mask)
    for name in ("loss", "clipped", "clipped_lower", "kl"):
        assert torch.equal(getattr(sums, name), getattr(clean, name)), name
    assert torch.isfinite(torch.autograd.grad(sums.loss, leaf)[0]).all()


def without_gaps(b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same trained tokens moved together, the masked ones gone."""
    packed = {}
    for key, x in b.items():
        if x.shape != b["mask"].shape:
            packed[key] = x
            continue
        packed[key] = torch.zeros_like(x)
        for row, on in enumerate(b["mask"] > 0):
            packed[key][row, : int(on.sum())] = x[row, on]
    return packed


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_tool_tokens_do_not_shift_the_loss(name: str) -> None:
    b = batch_of()
    packed = without_gaps(b)
    with_gaps, without = policy_loss(name, loss_input(b)), policy_loss(name, loss_input(packed))
    torch.testing.assert_close(with_gaps.per_token[b["mask"] > 0], without.per_token[packed["mask"] > 0])


@pytest.mark.parametrize("name", ["gae", "tppo", "reinforce_plus_plus", "remax", "grpo"])
def test_tool_tokens_do_not_shift_the_credit(name: str) -> None:
    b = batch_of()
    packed = without_gaps(b)
    with_gaps, without = estimate(name, advantage_input(b)), estimate(name, advantage_input(packed))
    torch.testing.assert_close(with_gaps.advantages[b["mask"] > 0], without.advantages[packed["mask"] > 0])


def test_a_reward_on_a_tool_token_counts_when_lengths_are_known() -> None:
    rewards = torch.tensor([[0.0, 1.0, math.nan], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    ids = torch.zeros(2, dtype=torch.int64)
    known = AdvantageInput(rewards, mask, ids, lengths=torch.tensor([2, 2]))
    assert known.scores().tolist() == [1.0, 0.0]
    assert AdvantageInput(rewards, mask, ids).scores().tolist() == [0.0, 0.0]


# ---- 5. a resumed trajectory ----


@pytest.mark.parametrize("name", ["ppo", "cispo", "aipo", "gpg", "sapo", "dro"])
def test_a_resumed_trajectory_keeps_the_log_probs_of_each_sampler(name: str) -> None:
    """Two segments sampled under different weights cost what they cost apart."""
    b = batch_of()
    whole = policy_loss(name, loss_input(b)).per_token
    for part in (slice(0, 3), slice(3, None)):
        piece = {k: x[:, part] if x.shape == b["mask"].shape else x for k, x in b.items()}
        torch.testing.assert_close(policy_loss(name, loss_input(piece)).per_token, whole[:, part])


# ---- 6. effective sample size ----


def test_clamped_weights_hide_the_collapse() -> None:
    log_weights = torch.zeros(1, 100)
    log_weights[0, 0] = 15.0
    mask = torch.ones_like(log_weights)
    metrics = importance_weights(log_weights, mask, "token", parse_band(2.0)).metrics
    assert metrics["rollout_is_eff_sample_size"] > 0.98
    assert metrics["rollout_is_ess_untruncated"] < 0.011
    assert ess(log_weights[0]) == pytest.approx(float(metrics["rollout_is_ess_untruncated"]))


def test_the_sample_size_survives_weights_beyond_floating_point() -> None:
    log_weights = torch.tensor([[500.0, 500.0, -math.inf, 0.0]])
    assert effective_sample_size(log_weights, torch.ones(1, 4)).item() == pytest.approx(0.5)
    assert effective_sample_size(log_weights, torch.zeros(1, 4)).item() == 1.0
    assert ess(torch.zeros(0)) == 1.0


# ---- 7. version stamps ----


def test_the_interpolation_runs_on_each_tokens_own_version() -> None:
    versions = torch.tensor([[-1, 2, 7, 8, 9]])
    torch.testing.assert_close(interpolation_weight(versions, 8), torch.tensor([[0.0, 5 / 6, 0.0, 0.0, 0.0]]))
    behaviour = torch.full((1, 5), -2.0)
    now = torch.full((1, 5), -1.0)
    own = approximate_proximal(behaviour, now, versions, 8)
    late_stamp = approximate_proximal(behaviour, now, torch.full_like(versions, 8), 8)
    torch.testing.assert_close(own, torch.tensor([[-2.0, -7 / 6, -2.0, -2.0, -2.0]]))
    # One version read after the reply arrived would make every token look fresh.
    assert torch.equal(late_stamp, behaviour)
