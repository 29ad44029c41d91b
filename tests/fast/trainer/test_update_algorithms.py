"""Every loss and aggregation through the trainer's own update: finite, the policy moves, no cut shows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headrace.algorithms.registries import AGGREGATIONS, POLICY_LOSSES
from headrace.wire.payloads import Sample
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.advantages import with_advantages
from headrace_trainer.learning.update import Updater, UpdateSums
from headrace_trainer.model.optimize import learnable
from tests.process.trainer import test_gradient_equivalence as equivalence
from tests.support.learners import NEEDS, config, learn, with_reward


@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
def test_losses_that_read_the_behaviour_policy_are_known(
    loss: str, ranks: Ranks, samples: list[Sample]
) -> None:
    """Those whose gradient changes with the engine's log-probs while the old ones stay."""
    grads = []
    for shift in (0.0, 0.2):
        weighted = {"rollout_correction": {"rollout_is": "token"}} if loss == "bypass_reinforce" else {}
        c = config(actor={"policy_loss": loss}, algorithm=weighted, **NEEDS.get(loss, {}))
        model = equivalence.packed("llama-tied")
        updater = Updater(c, equivalence.still(model), ranks)
        (rows,) = with_advantages(c, [samples], ranks)
        for row in rows:
            row.old_log_probs = row.trajectory.log_probs.astype("float64")
            behaviour = row.trajectory.log_probs - shift * np.arange(len(row.trajectory.log_probs))
            row.trajectory = dataclasses.replace(row.trajectory, log_probs=behaviour.astype("float32"))
        updater.step(rows, UpdateSums())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*grads) == (not POLICY_LOSSES.get(loss).behaviour_log_probs)


@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
def test_loss(loss: str, ranks: Ranks, samples: list[Sample], model_dir: str) -> None:
    c = config(actor={"policy_loss": loss}, **NEEDS.get(loss, {}))
    learned, moved = learn(c, ranks, samples, model_dir)
    assert np.isfinite(learned.sums.vector()).all()
    assert moved > 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
def test_aggregation(aggregation: str, ranks: Ranks, samples: list[Sample], model_dir: str) -> None:
    learned, moved = learn(config(actor={"loss_agg_mode": aggregation}), ranks, samples, model_dir)
    assert np.isfinite(learned.sums.vector()).all()
    assert moved > 0


def test_the_entropy_bonus_raises_entropy(ranks: Ranks, samples: list[Sample]) -> None:
    """With nothing but the bonus, a step makes the policy less certain."""
    equal = [
        Sample(s.prompt, [with_reward(t, 0.5) for t in s.trajectories], s.owner, s.attempt) for s in samples
    ]
    c = config(actor={"entropy_coeff": 1.0})
    model = equivalence.packed("llama-tied").float()
    part = learnable(model, c.actor.optim, c.optimizer_steps)
    updater = Updater(c, part, ranks)
    first, second = UpdateSums(), UpdateSums()
    (rows,) = with_advantages(c, [equal], ranks)
    assert all(not row.advantages.any() for row in rows)
    updater.step(rows, first)
    updater.step(rows, second)
    assert second.entropy > first.entropy


CUT_DEPENDENT = {"m2po", "kl_cov"}
"""They choose tokens within a micro-batch."""


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [(loss, None) for loss in POLICY_LOSSES.names() if loss not in CUT_DEPENDENT]
    + [("ppo", a) for a in AGGREGATIONS.names()],
)
def test_no_gradient_depends_on_the_cut(
    loss: str, aggregation: str | None, ranks: Ranks, samples: list[Sample]
) -> None:
    """Whole, or trajectory by trajectory in reverse: the same to 1e-9, with entropy bonus and KL loss."""
    grads = []
    for limit, turn in ((10_000, 1), (equivalence.LONGEST, -1)):
        actor = {
            "policy_loss": loss,
            "loss_agg_mode": aggregation,
            "ppo_max_token_len_per_gpu": limit,
            "entropy_coeff": 0.01,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
        }
        c = config(actor=actor, **NEEDS.get(loss, {}))
        model = equivalence.packed("llama-tied")
        updater = Updater(c, equivalence.still(model), ranks)
        (rows,) = with_advantages(c, [samples], ranks)
        for row in rows:
            row.ref_log_probs = row.trajectory.log_probs - 0.25
        updater.begin_window()
        updater.recompute_old([rows])
        assert updater.step(rows[::turn], UpdateSums())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    whole, cut = grads
    assert float((whole - cut).norm() / whole.norm()) < 1e-9


def test_the_effective_sample_size_sees_collapse_beyond_the_clamp(
    ranks: Ranks, samples: list[Sample]
) -> None:
    """Two tokens far off, one e^30 times as heavy as the other: one token counts, not two."""
    model = equivalence.packed("llama-tied")
    updater = Updater(config(), equivalence.still(model), ranks)
    (rows,) = with_advantages(config(), [samples], ranks)
    hurt = next(row for row in rows if row.trajectory.loss_mask.sum() >= 2)
    first, second, *_ = np.flatnonzero(hurt.trajectory.loss_mask)
    far = hurt.trajectory.log_probs.copy()
    far[first] -= 60
    far[second] -= 30
    hurt.trajectory = dataclasses.replace(hurt.trajectory, log_probs=far)
    sums = UpdateSums()
    assert updater.step(rows, sums)
    share = sums.weight**2 / (sums.tokens * sums.weight_squared)
    assert share == pytest.approx(1 / sums.tokens, rel=1e-6)
