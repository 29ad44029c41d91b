"""Every estimator and every loss through the trainer's own update: finite, and the policy moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algorithm_names import AGGREGATIONS, ESTIMATORS, LOSSES
from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS
from headrace.algorithms.policy_loss import POLICY_LOSSES
from headrace.config import RunConfig
from headrace.wire import Sample
from headrace_trainer.advantages import with_advantages
from headrace_trainer.ranks import Ranks
from headrace_trainer.update import Updater, UpdateSums, build_optimizer
from tests.single_rank import single_rank
from tests.unit import test_gradient_equivalence as equivalence


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with single_rank() as found:
        yield found


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return equivalence.samples("llama-tied")


def config(**sections: dict[str, Any]) -> RunConfig:
    plain = equivalence.config(equivalence.Case([])).model_dump()
    for name, values in sections.items():
        plain[name].update(values)
    plain["actor"]["optim"]["lr"] = 1e-3
    return RunConfig.model_validate(plain)


def update(config: RunConfig, ranks: Ranks, samples: list[Sample]) -> tuple[UpdateSums, float]:
    """One step on a fresh model; the sums, and how far the parameters went."""
    model = equivalence.build("llama-tied").float()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, schedule = build_optimizer(config.actor, model)
    updater = Updater(config, model, optimizer, schedule, ranks, pad_id=0)
    sums = UpdateSums()
    (rows,) = with_advantages(config, [samples], ranks)
    updater.begin_window()
    updater.recompute_old([rows])
    assert updater.step(rows, sums), "the gradient was not finite"
    moved = sum(float((p.detach() - q).abs().sum()) for p, q in zip(model.parameters(), before, strict=True))
    return sums, moved


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_estimator(estimator: str, ranks: Ranks, samples: list[Sample]) -> None:
    sums, moved = update(config(algorithm={"adv_estimator": estimator}), ranks, samples)
    assert np.isfinite(sums.vector()).all()
    assert moved > 0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_loss(loss: str, ranks: Ranks, samples: list[Sample]) -> None:
    recomputed = {"use_rollout_log_probs": loss != "decoupled_ppo"}
    c = config(actor={"policy_loss": loss}, async_training=recomputed)
    sums, moved = update(c, ranks, samples)
    assert np.isfinite(sums.vector()).all()
    assert moved > 0


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_aggregation(aggregation: str, ranks: Ranks, samples: list[Sample]) -> None:
    sums, moved = update(config(actor={"loss_agg_mode": aggregation}), ranks, samples)
    assert np.isfinite(sums.vector()).all()
    assert moved > 0


def test_the_entropy_bonus_raises_entropy(ranks: Ranks, samples: list[Sample]) -> None:
    """With nothing but the bonus, a step makes the policy less certain."""
    equal = [
        Sample(s.prompt, [_with_reward(t, 0.5) for t in s.trajectories], s.owner, s.attempt) for s in samples
    ]
    c = config(actor={"entropy_coeff": 1.0})
    model = equivalence.build("llama-tied").float()
    optimizer, schedule = build_optimizer(c.actor, model)
    updater = Updater(c, model, optimizer, schedule, ranks, pad_id=0)
    first, second = UpdateSums(), UpdateSums()
    (rows,) = with_advantages(c, [equal], ranks)
    assert all(not row.advantages.any() for row in rows)
    updater.step(rows, first)
    updater.step(rows, second)
    assert second.entropy > first.entropy


def _with_reward(t: Any, reward: float) -> Any:
    return type(t)(t.token_ids, t.log_probs, t.loss_mask, t.segments, t.temperature, t.finish_reason, reward)


def test_advantages_are_statistics_of_the_whole_batch(ranks: Ranks, samples: list[Sample]) -> None:
    """Cutting the batch into mini-batches changes nothing, whitening included."""
    c = config(algorithm={"adv_estimator": "reinforce_plus_plus_baseline"})
    (whole,) = with_advantages(c, [samples], ranks)
    halves = with_advantages(c, [samples[:1], samples[1:]], ranks)
    for a, b in zip(whole, [r for half in halves for r in half], strict=True):
        np.testing.assert_array_equal(a.advantages, b.advantages)


def test_overlong_responses_are_punished(samples: list[Sample]) -> None:
    c = config(algorithm={"adv_estimator": "reinforce_plus_plus", "overlong_buffer_len": 4})
    plain = config(algorithm={"adv_estimator": "reinforce_plus_plus"})
    (punished,), (free,) = with_advantages(c, [samples]), with_advantages(plain, [samples])
    longest = max(range(len(free)), key=lambda i: free[i].span.stop - free[i].span.start)
    assert len(free[longest].trajectory.token_ids) == 14
    assert punished[longest].advantages[-1] < free[longest].advantages[-1]


def test_own_estimator_and_loss_from_a_file(
    tmp_path: Path, ranks: Ranks, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        registry.names()  # ours are loaded before the copy is made
    file = tmp_path / "mine.py"
    file.write_text(
        "from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, per_trajectory\n"
        "from headrace.algorithms.policy_loss import POLICY_LOSSES, finish\n"
        "@ADVANTAGE_ESTIMATORS.register('half')\n"
        "def half(batch):\n"
        "    return per_trajectory(batch, batch.scores() - 0.5)\n"
        "@POLICY_LOSSES.register('plain')\n"
        "def plain(inputs):\n"
        "    return finish(inputs, -inputs.advantages * inputs.log_probs * inputs.settings.extra['weight'])\n"
    )
    # Names are for the life of the process: leave none behind for other tests.
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS._entries))
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES._entries))
    own = {"adv_estimator": "half", "modules": [str(file)]}
    loss = {"policy_loss": "plain", "policy_loss_settings": {"weight": 2.0}, "loss_agg_mode": "token-mean"}
    sums, moved = update(config(algorithm=own, actor=loss), ranks, samples)
    assert np.isfinite(sums.vector()).all()
    assert moved > 0
    (rows,) = with_advantages(config(algorithm=own, actor=loss), [samples])
    for row in rows:
        on = row.trajectory.loss_mask > 0
        np.testing.assert_allclose(row.advantages[on], row.trajectory.reward - 0.5, rtol=1e-6)
    assert torch.isfinite(torch.tensor(moved))


def test_recomputed_log_probs_are_those_of_the_window_start(ranks: Ranks, samples: list[Sample]) -> None:
    """After local updates: old is what the weights at the window's start say, and nothing else changes."""
    c = config(async_training={"use_rollout_log_probs": False})
    model = equivalence.build("llama-tied").float()
    optimizer, schedule = build_optimizer(c.actor, model)
    updater = Updater(c, model, optimizer, schedule, ranks, pad_id=0)
    (rows,) = with_advantages(c, [samples], ranks)
    updater.begin_window()
    updater.recompute_old([rows])
    first = [row.old_log_probs for row in rows]
    expected = equivalence.response_log_probs(
        equivalence.build("llama-tied"),
        rows[0].prompt.token_ids,
        rows[0].trajectory.token_ids,
        rows[0].trajectory.temperature,
    )
    np.testing.assert_allclose(first[0], expected.detach().numpy(), atol=1e-4)
    for _ in range(2):
        assert updater.step(rows, UpdateSums())
    live = [p.detach().clone() for p in model.parameters()]
    state = [t.clone() for s in optimizer.state.values() for t in s.values()]
    updater.recompute_old([rows])
    for before, row in zip(first, rows, strict=True):
        np.testing.assert_array_equal(before, row.old_log_probs)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), live, strict=True))
    after = [t for s in optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    updater.begin_window()
    updater.recompute_old([rows])
    assert not np.array_equal(first[0], rows[0].old_log_probs), "a new window has other weights"


@pytest.mark.parametrize(
    "correction",
    [
        {"rollout_is": "token"},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
        {"rollout_token_veto_threshold": 1e-4},
    ],
)
def test_rollout_correction(correction: dict[str, Any], ranks: Ranks, samples: list[Sample]) -> None:
    c = config(algorithm={"rollout_correction": correction}, async_training={"use_rollout_log_probs": False})
    sums, moved = update(c, ranks, samples)
    assert np.isfinite(sums.vector()).all()
    assert moved > 0
