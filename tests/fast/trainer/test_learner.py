"""A whole local update: critic, reference, proximal policy, corrections, and what is not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS
from headrace.algorithms.policy_loss import POLICY_LOSSES
from headrace.wire.payloads import Sample
from headrace_trainer.checkpoints.checkpoint import Checkpoints
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.advantages import with_advantages
from headrace_trainer.learning.learner import Learned, Learner
from headrace_trainer.learning.update import Updater, UpdateSums
from headrace_trainer.model.optimize import learnable
from headrace_trainer.model.rows import BatchRow, FloatArray, make_rows
from tests.process.trainer import test_gradient_equivalence as equivalence
from tests.support import tiny_models
from tests.support.learners import config, learn, parameters, untimed, with_model, with_reward


@pytest.mark.parametrize("estimator", ["gae", "tppo"])
def test_the_critic_learns_the_returns(
    estimator: str, ranks: Ranks, samples: list[Sample], model_dir: str
) -> None:
    """Its loss falls, its values come to the rewards; the policy stands still while it warms up."""
    c = config(
        algorithm={"adv_estimator": estimator, "lam": 0.95},
        critic={"enable": True, "warmup_updates": 40, "optim": {"lr": 1e-3}, "cliprange_value": 10.0},
    )
    learner = Learner(with_model(c, model_dir), ranks)
    before = parameters(learner.model)
    learner.begin_window()
    found = [learner.learn([samples], {"0": 0}, 0, untimed).metrics for _ in range(40)]
    assert found[0]["critic/values/mean"] == 0.0, "a fresh value head says nothing"
    assert found[-1]["critic/vf_loss"] < 0.3 * found[0]["critic/vf_loss"]
    assert found[-1]["critic/vf_explained_var"] > found[0]["critic/vf_explained_var"]
    assert all(m["critic/skipped_steps"] == 0 for m in found)
    assert all(torch.equal(p, q) for p, q in zip(parameters(learner.model), before, strict=True))
    learner.learn([samples], {"0": 0}, 0, untimed)
    assert not all(torch.equal(p, q) for p, q in zip(parameters(learner.model), before, strict=True))


def poisoned(model_dir: str, out: Path) -> str:
    """A model whose embedding of token 2 is nan."""
    from transformers import AutoModelForCausalLM

    tiny_models.save("llama", out)
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = torch.nan
    model.save_pretrained(out)
    return str(out)


def test_what_is_not_finite_never_reaches_the_optimizer(
    ranks: Ranks, samples: list[Sample], model_dir: str, tmp_path: Path
) -> None:
    """Only the sample that meets the broken token is left out, and named; the others are trained without."""
    hurt = dataclasses.replace(
        samples[1].prompt, token_ids=np.append(samples[1].prompt.token_ids, 2).astype("int32")
    )
    mixed = [samples[0], dataclasses.replace(samples[1], prompt=hurt), *samples[2:]]
    learner = Learner(with_model(config(), poisoned(model_dir, tmp_path / "poisoned")), ranks)
    learner.begin_window()
    learned = learner.learn([mixed], {"0": 0}, 0, untimed)
    assert set(learned.rejected) == {hurt.sample_id}
    assert learned.sums.skipped == 1
    assert learned.stepped == 1
    assert np.isfinite(learned.sums.vector()).all()
    alone = Learner(with_model(config(), str(tmp_path / "poisoned")), ranks)
    alone.begin_window()
    alone.learn([[samples[0], *samples[2:]]], {"0": 0}, 0, untimed)
    for p, q in zip(parameters(learner.model), parameters(alone.model), strict=True):
        torch.testing.assert_close(p, q, equal_nan=True, rtol=0, atol=1e-7)
    everything_is_hurt = [dataclasses.replace(s, prompt=hurt) for s in samples]
    learned = learner.learn([everything_is_hurt], {"0": 0}, 1, untimed)
    assert learned.stepped == 0
    assert set(learned.rejected) == {hurt.sample_id}


def test_a_checkpoint_holds_policy_and_critic_under_fsdp(
    ranks: Ranks, samples: list[Sample], model_dir: str, tmp_path: Path
) -> None:
    c = with_model(config(algorithm={"adv_estimator": "gae"}, critic={"enable": True}), model_dir)
    first, second = Learner(c, ranks), Learner(c, ranks)
    first.begin_window()
    for _ in range(2):
        first.learn([samples], {"0": 0}, 0, untimed)
    path = Checkpoints(tmp_path, c, first.parts, ranks).save(TrainingProgress(step=2))
    Checkpoints(tmp_path, c, second.parts, ranks).load(path)
    assert set(first.parts) == {"policy", "critic"}
    for name, part in first.parts.items():
        other = second.parts[name]
        for p, q in zip(parameters(part.model), parameters(other.model), strict=True):
            assert torch.equal(p, q)
        for key, value in part.optimizer.state_dict()["state"].items():
            for what, t in value.items():
                found = other.optimizer.state_dict()["state"][key][what]
                assert torch.equal(
                    t.full_tensor() if hasattr(t, "full_tensor") else t,
                    found.full_tensor() if hasattr(found, "full_tensor") else found,
                )
    second.begin_window()
    a = first.learn([samples], {"0": 0}, 2, untimed).metrics["critic/vf_loss"]
    b = second.learn([samples], {"0": 0}, 2, untimed).metrics["critic/vf_loss"]
    assert a == b, "they go on alike"
    for name, part in first.parts.items():
        for p, q in zip(parameters(part.model), parameters(second.parts[name].model), strict=True):
            assert torch.equal(p, q), "to the bit"


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["low_var_kl", "kl+", "mse", "abs"])
def test_the_kl_loss_pulls_towards_the_reference(
    kind: str, offload: bool, ranks: Ranks, samples: list[Sample], model_dir: str, tmp_path: Path
) -> None:
    """With nothing to learn from the rewards, the divergence to another model falls."""
    tiny_models.save("llama-tied", tmp_path / "other", seed=1)
    equal = [
        dataclasses.replace(s, trajectories=[with_reward(t, 0.5) for t in s.trajectories]) for s in samples
    ]
    c = config(
        actor={"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": kind},
        ref={"path": str(tmp_path / "other"), "param_offload": offload},
    )
    first, moved = learn(c, ranks, equal, model_dir)
    later, _ = learn(c, ranks, equal, model_dir, updates=8)
    assert moved > 0
    assert later.sums.reference_kl < first.sums.reference_kl


def test_kl_in_the_reward_and_its_controller(
    ranks: Ranks, samples: list[Sample], model_dir: str, tmp_path: Path
) -> None:
    """Against itself the divergence is that of the engine's noise; against another model it is taken off."""
    tiny_models.save("llama-tied", tmp_path / "other", seed=1)
    control = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.05, "horizon": 100}
    algorithm = {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True, "kl_ctrl": control}
    c = with_model(config(algorithm=algorithm, ref={"path": str(tmp_path / "other")}), model_dir)
    learner = Learner(c, ranks)
    learner.begin_window()
    learned = learner.learn([samples], {"0": 0}, 0, untimed)
    kl = learned.metrics["actor/reward_kl_penalty"]
    assert kl > 0.1
    # 16 trajectories, an error beyond the controller's limit of 20 %: 0.5 * (1 + 0.2 * 16 / 100).
    assert learner.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 16 / 100))
    assert learned.metrics["actor/reward_kl_penalty_coeff"] == 0.5
    # By hand: the return of a trajectory's first trained token, without whitening.
    rows = make_rows([samples])
    learner._reference.score(rows[0])  # type: ignore[union-attr]
    row = rows[0][0]
    other = equivalence.response_log_probs(
        tiny_models.build("llama-tied", 1).double(),
        row.prompt.token_ids,
        row.trajectory.token_ids,
        row.trajectory.temperature,
    )
    assert row.ref_log_probs is not None
    np.testing.assert_allclose(row.ref_log_probs, other.detach().numpy(), atol=1e-4)


def test_the_log_linear_proximal_policy_runs_on_the_update_clock(
    ranks: Ranks, samples: list[Sample], model_dir: str
) -> None:
    """No update since the behaviour weights: proximal = behaviour. Later it lies nearer to the current one,
    which a clock that counts versions would not see: the version is 0 all the time."""
    method = {"policy_loss": "decoupled_ppo", "prox_logp_method": "loglinear", "behaviour_weight_cap": None}
    c = config(actor=method)
    learner = Learner(with_model(c, model_dir), ranks)
    learner.begin_window()
    old_kl, kl = [], []
    for steps in (0, 1, 2, 8):
        sums = learner.learn([samples], {"0": 0}, steps, untimed).sums
        old_kl.append(sums.old_kl / sums.tokens)
        kl.append(sums.kl / sums.tokens)
    assert old_kl[0] == pytest.approx(kl[0], rel=1e-5), "gap 0"
    assert old_kl[1] == pytest.approx(kl[1], rel=1e-5), "gap 1: the behaviour policy is one update old"
    assert old_kl[2] == pytest.approx(kl[2] / 2, rel=1e-3), "gap 2: half way"
    assert old_kl[3] == pytest.approx(kl[3] / 8, rel=1e-3), "gap 8: an eighth is left"


@pytest.mark.parametrize("recomputed", [False, True])
def test_rejection_leaves_tokens_out(
    recomputed: bool, ranks: Ranks, samples: list[Sample], model_dir: str
) -> None:
    """Where trainer and engine disagree, whichever log-probs are the old ones."""
    rejection = {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.02}
    async_training = {"use_rollout_log_probs": not recomputed}
    plain, _ = learn(config(async_training=async_training), ranks, samples, model_dir)
    c = config(algorithm={"rollout_correction": rejection}, async_training=async_training)
    kept, _ = learn(c, ranks, samples, model_dir)
    assert kept.sums.loss != plain.sums.loss
    assert kept.sums.grad_norms != plain.sums.grad_norms


def test_own_estimator_and_loss_from_a_file(
    tmp_path: Path,
    ranks: Ranks,
    samples: list[Sample],
    model_dir: str,
    monkeypatch: pytest.MonkeyPatch,
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
    learned, moved = learn(config(algorithm=own, actor=loss), ranks, samples, model_dir)
    assert np.isfinite(learned.sums.vector()).all()
    assert moved > 0
    (rows,) = with_advantages(config(algorithm=own, actor=loss), [samples])
    for row in rows:
        on = row.trajectory.loss_mask > 0
        np.testing.assert_allclose(row.advantages[on], row.trajectory.reward - 0.5, rtol=1e-6)


def old_log_probs(rows: list[BatchRow]) -> list[FloatArray]:
    found = [row.old_log_probs for row in rows if row.old_log_probs is not None]
    assert len(found) == len(rows)
    return found


def test_recomputed_log_probs_are_those_of_the_window_start(ranks: Ranks, samples: list[Sample]) -> None:
    """After local updates: old is what the weights at the window's start say, and nothing else changes."""
    c = config(async_training={"use_rollout_log_probs": False})
    model = equivalence.packed("llama-tied").float()
    part = learnable(model, c.actor.optim, c.optimizer_steps)
    updater = Updater(c, part, ranks)
    (rows,) = with_advantages(c, [samples], ranks)
    updater.begin_window()
    updater.recompute_old([rows])
    first = old_log_probs(rows)
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
    state = [t.clone() for s in part.optimizer.state.values() for t in s.values()]
    updater.recompute_old([rows])
    for before, row in zip(first, rows, strict=True):
        np.testing.assert_array_equal(before, row.old_log_probs)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), live, strict=True))
    after = [t for s in part.optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    updater.begin_window()
    updater.recompute_old([rows])
    assert not np.array_equal(first[0], old_log_probs(rows)[0]), "a new window has other weights"


@pytest.mark.parametrize(
    "correction",
    [
        {"rollout_is": "token"},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
        {"rollout_token_veto_threshold": 1e-4},
    ],
)
def test_rollout_correction(
    correction: dict[str, Any], ranks: Ranks, samples: list[Sample], model_dir: str
) -> None:
    c = config(algorithm={"rollout_correction": correction}, async_training={"use_rollout_log_probs": False})
    learned, moved = learn(c, ranks, samples, model_dir)
    assert np.isfinite(learned.sums.vector()).all()
    assert moved > 0


def test_a_model_that_takes_no_step_is_stuck(ranks: Ranks, model_dir: str) -> None:
    """The policy, or the critic beside a policy that learns or still waits for it."""
    plain = Learner(with_model(config(), model_dir), ranks)
    c = with_model(config(algorithm={"adv_estimator": "gae"}, critic={"enable": True}), model_dir)
    both = Learner(c, ranks)
    for learner in (plain, both):
        assert learner.is_stuck(Learned(UpdateSums(), optimizer_steps=2, stepped=0, critic_stepped=2))
        assert not learner.is_stuck(Learned(UpdateSums(), optimizer_steps=2, stepped=1, critic_stepped=1))
    assert both.is_stuck(Learned(UpdateSums(), optimizer_steps=2, stepped=2, critic_stepped=0))
    assert both.is_stuck(Learned(UpdateSums(), optimizer_steps=0, stepped=0, critic_stepped=0))
    assert not both.is_stuck(Learned(UpdateSums(), optimizer_steps=0, stepped=0, critic_stepped=1))
    assert not plain.is_stuck(Learned(UpdateSums(), optimizer_steps=2, stepped=1))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"async_training": {"use_rollout_log_probs": False}, "actor": {"use_kl_loss": True}},
        {"algorithm": {"adv_estimator": "gae"}, "critic": {"enable": True}},
        {"actor": {"policy_loss": "gspo"}, "algorithm": {"use_kl_in_reward": True}},
    ],
    ids=["default", "recomputed", "critic", "sequence-level"],
)
def test_what_an_environment_said_is_read_and_not_trained(
    sections: dict[str, Any], ranks: Ranks, samples: list[Sample], model_dir: str
) -> None:
    """Its tokens are context: change one, and what follows changes; the numbers that stand with it, the
    log-prob of no sampler, are never looked at."""

    def with_gaps(log_prob: float, shift: int = 0) -> list[Sample]:
        out = []
        for s in samples:
            group = []
            for t in s.trajectories:
                mask = np.arange(len(t.token_ids)) % 3 != 1
                ids = np.where(mask, t.token_ids, (t.token_ids + shift) % 90 + 3)
                log_probs = np.where(mask, t.log_probs, log_prob).astype("float32")
                group.append(
                    dataclasses.replace(
                        t, token_ids=ids.astype("int32"), log_probs=log_probs, loss_mask=mask.astype("uint8")
                    )
                )
            out.append(dataclasses.replace(s, trajectories=group))
        return out

    def outcome(given: list[Sample]) -> tuple[list[float], list[float], dict[str, float]]:
        learned, moved = learn(config(**sections), ranks, given, model_dir)
        return learned.sums.vector(), [moved, *learned.sums.grad_norms], learned.metrics

    zero, other = outcome(with_gaps(0.0)), outcome(with_gaps(-50.0))
    assert zero == other
    trained = sum(int(t.loss_mask.sum()) for s in with_gaps(0.0) for t in s.trajectories)
    assert zero[0][UpdateSums.names().index("tokens")] == trained
    if not sections:
        assert outcome(with_gaps(0.0, shift=7))[0] != zero[0]
