"""Advantages, losses and log-probs against numbers of other implementations, and their known hazards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms.advantages import grpo
from headrace.algorithms.aggregation import Denominators, aggregate, count
from headrace.algorithms.log_probs import LOG_RATIO_LIMIT, token_log_probs
from tests.fast.algorithms.algorithm_batches import ess, ppo_sums

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "algorithms_core.json").read_text()
)
BATCH = VECTORS["batch"]
NEAR: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


def f64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- advantages ----


@pytest.mark.parametrize(("norm", "key"), [(True, "norm_by_std"), (False, "centred")])
def test_grpo_is_what_verl_computes(norm: bool, key: str) -> None:
    rewards, found = f64(BATCH["seq_rewards"]), torch.zeros(len(BATCH["uid"]), dtype=torch.float64)
    for uid in sorted(set(BATCH["uid"])):
        rows = [i for i, u in enumerate(BATCH["uid"]) if u == uid]
        found[rows] = grpo(rewards[rows], norm)
    torch.testing.assert_close(found, f64(VECTORS["advantages"][key]), **NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rewards", [[0.7] * 7, [0.1] * 3, [0.9] * 6, [-1e8] * 5, [0.0] * 4])
def test_equal_rewards_teach_exactly_nothing(rewards: list[float], dtype: torch.dtype) -> None:
    found = grpo(torch.tensor(rewards, dtype=dtype))
    assert found.dtype == dtype
    assert found.tolist() == [0.0] * len(rewards)


def test_the_hazard_of_equal_rewards_is_real() -> None:
    """Without the check for zero spread the formula gives 0.056 for seven rewards of 0.7."""
    rewards = torch.tensor([0.7] * 7)
    assert float(((rewards - rewards.mean()) / (rewards.std() + 1e-6)).abs().max()) > 0.05


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16).filter(lambda r: max(r) - min(r) > 1e-3))
def test_grpo_centres_and_scales(rewards: list[float]) -> None:
    r = f64(rewards)
    for norm in (True, False):
        a = grpo(r, norm)
        assert abs(float(a.sum())) < 1e-6
        assert bool((a[r.argsort()].diff() >= 0).all()), "a better reward never gets a smaller advantage"
    assert float(grpo(r).std()) == pytest.approx(1.0, rel=0.01)
    torch.testing.assert_close(grpo(r + 5.0), grpo(r), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(grpo(r, False), r - r.mean())


@pytest.mark.parametrize("norm", [True, False])
def test_a_group_of_one_gets_its_reward(norm: bool) -> None:
    reward = torch.tensor([0.25])
    found = grpo(reward, norm)
    assert found.tolist() == [0.25]
    assert found.data_ptr() != reward.data_ptr()


# ---- the clipped loss ----


@pytest.mark.parametrize("name", VECTORS["policy_losses"])
def test_ppo_clip_is_what_verl_computes(name: str) -> None:
    """Loss, gradient and metrics of the token mean."""
    expected = VECTORS["policy_losses"][name]
    options = {"clip_" + k.removeprefix("clip_ratio_"): v for k, v in expected["config"].items()}
    log_probs = f64(BATCH["log_probs"]).requires_grad_()
    old = f64(BATCH["rollout_log_probs" if name == "old_is_rollout" else "old_log_probs"])
    advantages = f64(VECTORS["loss_advantages"])[:, None].expand_as(old)
    mask = f64(BATCH["response_mask"])
    result = ppo_sums(log_probs, old, advantages, mask, **options)
    tokens = float(mask.sum())
    (result.loss / tokens).backward()
    assert float(result.loss.detach()) / tokens == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(log_probs.grad, f64(expected["grad"]) * mask, **NEAR)
    metrics = expected["metrics"]
    assert float(result.clipped) / tokens == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)
    assert float(result.clipped_lower) / tokens == pytest.approx(metrics["actor/pg_clipfrac_lower"], abs=1e-6)
    assert float(result.kl) / tokens == pytest.approx(metrics["actor/ppo_kl"], abs=1e-6)


def test_the_vectors_tell_the_settings_apart() -> None:
    losses = [round(e["loss"], 6) for e in VECTORS["policy_losses"].values()]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # (rho, A) -> max(-A*rho, -A*clip(rho, 0.8, 1.28)), for A < 0 at most -3A; d/d lp is -A*rho or 0
        (1.0, 2.0, -2.0, -2.0),
        (1.27, 2.0, -2.54, -2.54),
        (1.5, 2.0, -2.56, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (2.9, -2.0, 5.8, 5.8),
        (3.5, -2.0, 6.0, 0.0),
        (3.5, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    log_probs = f64([[math.log(ratio) - 1.0]]).requires_grad_()
    result = ppo_sums(log_probs, f64([[-1.0]]), f64([[advantage]]), f64([[1.0]]), 0.2, 0.28, 3.0)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(loss)
    assert log_probs.grad is not None
    assert float(log_probs.grad) == pytest.approx(slope)


def test_metrics_carry_no_gradient() -> None:
    log_probs = f64([[-1.0]]).requires_grad_()
    result = ppo_sums(log_probs, f64([[-1.0]]), f64([[1.0]]), f64([[1.0]]))
    assert result.loss.requires_grad
    metrics = (result.clipped, result.clipped_lower, result.kl)
    assert [m.requires_grad for m in metrics] == [False] * 3


@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["log_probs", "old_log_probs", "advantages"])
def test_what_lies_outside_the_mask_does_not_matter(junk: float, where: str) -> None:
    """Neither in the values nor in the gradient of what lies inside."""
    tensors = {
        "log_probs": f64([[-1.0, -2.0, -0.5]]),
        "old_log_probs": f64([[-1.1, -1.0, -0.7]]),
        "advantages": f64([[1.0, 1.0, 1.0]]),
    }
    mask = f64([[1.0, 0.0, 1.0]])

    def run() -> tuple[list[float], list[float]]:
        log_probs = tensors["log_probs"].clone().requires_grad_()
        r = ppo_sums(log_probs, tensors["old_log_probs"], tensors["advantages"], mask)
        r.loss.backward()
        assert log_probs.grad is not None
        values = [float(x.detach()) for x in (r.loss, r.clipped, r.clipped_lower, r.kl)]
        return values, log_probs.grad[0, [0, 2]].tolist()

    clean = run()
    tensors[where][0, 1] = junk
    assert run() == clean


def test_a_fully_masked_batch_is_zero() -> None:
    log_probs = f64([[-math.inf, -1.0]]).requires_grad_()
    result = ppo_sums(log_probs, f64([[-1.0, -math.inf]]), f64([[1.0, -1.0]]), f64([[0.0, 0.0]]))
    assert [float(x.detach()) for x in (result.loss, result.clipped, result.kl)] == [0.0, 0.0, 0.0]
    nothing = f64([[0.0, 0.0]])
    assert float(aggregate("token-mean", nothing, nothing, count(nothing))) == 0.0


def test_log_ratios_are_clamped() -> None:
    result = ppo_sums(f64([[0.0]]), f64([[-1000.0]]), f64([[-1.0]]), f64([[1.0]]), clip_c=math.inf)
    assert float(result.loss) == pytest.approx(math.exp(LOG_RATIO_LIMIT))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4))
def test_rank_losses_average_to_the_global_token_mean(ranks: list[list[int]]) -> None:
    """FSDP2 averages over ranks; whatever the cut, the result is sum / tokens."""
    values = [v for rank in ranks for v in rank]
    whole = Denominators(len(values), len(ranks), data_parallel_size=len(ranks))
    rows = [f64([[float(v) for v in rank]]) for rank in ranks]
    shares = [float(aggregate("token-mean", row, torch.ones_like(row), whole)) for row in rows]
    averaged = sum(shares) / len(ranks)
    assert averaged == pytest.approx(sum(values) / len(values))


# ---- effective sample size ----


def test_ess_by_hand() -> None:
    assert ess(f64([0.3] * 5)) == pytest.approx(1.0)
    assert ess(f64([math.log(1), math.log(3)])) == pytest.approx(16 / 20)
    assert ess(f64([])) == 1.0


def test_ess_sees_collapse_through_no_clamp() -> None:
    """Log-weights clamped at 20 would make the two of the second line equal, and the ratio 1."""
    assert ess(f64([60.0] + [0.0] * 999)) == pytest.approx(1e-3)
    assert ess(f64([60.0, 30.0])) == pytest.approx(0.5)
    assert ess(f64([60.0, 60.0, 30.0, 30.0])) == pytest.approx(0.5)
    assert ess(f64([4000.0, 0.0])) == pytest.approx(0.5), "no overflow"


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=12), st.floats(-50, 50))
def test_ess_is_a_share_and_ignores_a_common_factor(log_weights: list[float], shift: float) -> None:
    w = f64(log_weights)
    share = ess(w)
    assert 1 / len(log_weights) - 1e-9 <= share <= 1 + 1e-9
    assert ess(w + shift) == pytest.approx(share, rel=1e-6)
    exact = w.exp().sum() ** 2 / (len(log_weights) * (w * 2).exp().sum())
    assert share == pytest.approx(float(exact), rel=1e-9)


# ---- log-probs ----


@pytest.mark.parametrize("temperatures", [[1.0, 1.0], [0.5, 1.7]])
def test_token_log_probs_are_those_of_the_tempered_distribution(temperatures: list[float]) -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 5, 11) * 3, torch.randint(0, 11, (2, 5))
    temperature = torch.tensor(temperatures)[:, None]
    found, entropy = token_log_probs(logits, ids, temperature)
    exact = torch.distributions.Categorical(logits=logits.double() / temperature.double()[..., None])
    torch.testing.assert_close(found.double(), exact.log_prob(ids), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), exact.entropy(), rtol=1e-5, atol=1e-5)


def test_token_log_probs_and_entropy_differentiate() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 3, 7, dtype=torch.float64, requires_grad=True)
    ids, temperature = torch.tensor([[1, 4, 6]]), torch.tensor([[0.7]])
    found, entropy = token_log_probs(logits, ids, temperature)
    one_hot = torch.nn.functional.one_hot(ids, 7)
    log_p = torch.log_softmax(logits.detach() / 0.7, -1)
    p = log_p.exp()
    (of_found,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    torch.testing.assert_close(of_found, (one_hot - p) / 0.7, rtol=1e-5, atol=1e-6)
    (of_entropy,) = torch.autograd.grad(entropy.sum(), logits)
    wanted = -p * (log_p + entropy.detach()[..., None]) / 0.7
    torch.testing.assert_close(of_entropy, wanted, rtol=1e-5, atol=1e-6)


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[[20.0, 0.0, -20.0]]], dtype=torch.bfloat16)
    found, entropy = token_log_probs(logits, torch.tensor([[2]]), torch.ones(1, 1))
    assert found.dtype == entropy.dtype == torch.float32
    assert float(found) == pytest.approx(-40.0, abs=1e-4)


def test_entropy_is_what_verl_computes() -> None:
    given_ = VECTORS["entropy"]
    logits = f64(given_["logits"])
    _, entropy = token_log_probs(logits, torch.zeros(logits.shape[:2], dtype=torch.int64), torch.ones(2, 1))
    torch.testing.assert_close(entropy.double(), f64(given_["token_entropy"]), rtol=1e-5, atol=1e-5)
