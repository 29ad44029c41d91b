"""Every estimator and every loss through the trainer's own update: finite, and the policy moves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algorithm_names import AGGREGATIONS, BEHAVIOUR_LOSSES, ESTIMATORS, LOSSES
from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, AdvantageInput, estimate
from headrace.algorithms.policy_loss import POLICY_LOSSES
from headrace.config import RunConfig
from headrace.wire import FinishReason, Sample, Segment
from headrace_trainer.advantages import fill_advantages, with_advantages
from headrace_trainer.checkpoint import Checkpoints, Progress
from headrace_trainer.learner import Learned, Learner
from headrace_trainer.optimize import learnable
from headrace_trainer.ranks import Ranks
from headrace_trainer.rows import make_rows
from headrace_trainer.update import Updater, UpdateSums
from tests.integration import tiny_models
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


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    tiny_models.save("llama-tied", directory)
    return str(directory)


def with_model(config: RunConfig, model_dir: str) -> RunConfig:
    plain = config.model_dump()
    plain["model"]["path"] = model_dir
    return RunConfig.model_validate(plain)


def parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in module.parameters()]  # type: ignore[attr-defined]


def learn(
    config: RunConfig, ranks: Ranks, samples: list[Sample], model_dir: str, updates: int = 1
) -> tuple[Learned, float]:
    """Updates of one window from a fresh model; the last one's outcome, and how far the policy went."""
    learner = Learner(with_model(config, model_dir), ranks)
    before = parameters(learner.model)
    learner.begin_window()
    for done in range(updates):
        learned = learner.learn([samples], {"0": 0}, done, contextlib.nullcontext)
        assert learned.stepped == 1, "something was not finite"
    moved = sum(float((p - q).abs().sum()) for p, q in zip(parameters(learner.model), before, strict=True))
    return learned, moved


def with_baseline(samples: list[Sample], reward: float) -> list[Sample]:
    return [dataclasses.replace(s, baseline_reward=reward) for s in samples]


NEEDS: dict[str, dict[str, dict[str, Any]]] = {
    "gae": {"critic": {"enable": True}},
    "tppo": {"critic": {"enable": True}},
    "optimal_token_baseline": {"async_training": {"use_rollout_log_probs": False}},
    "decoupled_ppo": {"async_training": {"use_rollout_log_probs": False}},
}
"""What an estimator or a loss asks for beside its name."""


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
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


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
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


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_losses_that_read_the_behaviour_policy_are_known(
    loss: str, ranks: Ranks, samples: list[Sample]
) -> None:
    """Those whose gradient changes with the engine's log-probs while the old ones stay."""
    grads = []
    for shift in (0.0, 0.2):
        weighted = {"rollout_correction": {"rollout_is": "token"}} if loss == "bypass_reinforce" else {}
        c = config(actor={"policy_loss": loss}, algorithm=weighted, **NEEDS.get(loss, {}))
        model = equivalence.build("llama-tied")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        updater = Updater(
            c, model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0), ranks, pad_id=0
        )
        (rows,) = with_advantages(c, [samples], ranks)
        for row in rows:
            row.old_log_probs = row.trajectory.log_probs.astype("float64")
            behaviour = row.trajectory.log_probs - shift * np.arange(len(row.trajectory.log_probs))
            row.trajectory = dataclasses.replace(row.trajectory, log_probs=behaviour.astype("float32"))
        updater.step(rows, UpdateSums())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*grads) == (loss not in BEHAVIOUR_LOSSES)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_loss(loss: str, ranks: Ranks, samples: list[Sample], model_dir: str) -> None:
    c = config(actor={"policy_loss": loss}, **NEEDS.get(loss, {}))
    learned, moved = learn(c, ranks, samples, model_dir)
    assert np.isfinite(learned.sums.vector()).all()
    assert moved > 0


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
    found = [learner.learn([samples], {"0": 0}, 0, contextlib.nullcontext).metrics for _ in range(40)]
    assert found[0]["critic/values/mean"] == 0.0, "a fresh value head says nothing"
    assert found[-1]["critic/vf_loss"] < 0.3 * found[0]["critic/vf_loss"]
    assert found[-1]["critic/vf_explained_var"] > found[0]["critic/vf_explained_var"]
    assert all(m["critic/skipped_steps"] == 0 for m in found)
    assert all(torch.equal(p, q) for p, q in zip(parameters(learner.model), before, strict=True))
    learner.learn([samples], {"0": 0}, 0, contextlib.nullcontext)
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
    learned = learner.learn([mixed], {"0": 0}, 0, contextlib.nullcontext)
    assert set(learned.rejected) == {hurt.sample_id}
    assert learned.sums.skipped == 1
    assert learned.stepped == 1
    assert np.isfinite(learned.sums.vector()).all()
    alone = Learner(with_model(config(), str(tmp_path / "poisoned")), ranks)
    alone.begin_window()
    alone.learn([[samples[0], *samples[2:]]], {"0": 0}, 0, contextlib.nullcontext)
    for p, q in zip(parameters(learner.model), parameters(alone.model), strict=True):
        torch.testing.assert_close(p, q, equal_nan=True, rtol=0, atol=1e-7)
    everything_is_hurt = [dataclasses.replace(s, prompt=hurt) for s in samples]
    learned = learner.learn([everything_is_hurt], {"0": 0}, 1, contextlib.nullcontext)
    assert learned.stepped == 0
    assert set(learned.rejected) == {hurt.sample_id}


def test_a_checkpoint_holds_policy_and_critic_under_fsdp(
    ranks: Ranks, samples: list[Sample], model_dir: str, tmp_path: Path
) -> None:
    c = with_model(config(algorithm={"adv_estimator": "gae"}, critic={"enable": True}), model_dir)
    first, second = Learner(c, ranks), Learner(c, ranks)
    first.begin_window()
    for _ in range(2):
        first.learn([samples], {"0": 0}, 0, contextlib.nullcontext)
    path = Checkpoints(tmp_path, 1, first.parts, ranks).save(Progress(step=2))
    Checkpoints(tmp_path, 1, second.parts, ranks).load(path)
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
    a = first.learn([samples], {"0": 0}, 2, contextlib.nullcontext).metrics["critic/vf_loss"]
    b = second.learn([samples], {"0": 0}, 2, contextlib.nullcontext).metrics["critic/vf_loss"]
    assert a == b, "they go on alike"


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


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["low_var_kl", "kl+", "mse", "abs"])
def test_the_kl_loss_pulls_towards_the_reference(
    kind: str, offload: bool, ranks: Ranks, samples: list[Sample], model_dir: str, tmp_path: Path
) -> None:
    """With nothing to learn from the rewards, the divergence to another model falls."""
    tiny_models.save("llama-tied", tmp_path / "other", seed=1)
    equal = [
        dataclasses.replace(s, trajectories=[_with_reward(t, 0.5) for t in s.trajectories]) for s in samples
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
    learned = learner.learn([samples], {"0": 0}, 0, contextlib.nullcontext)
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
        sums = learner.learn([samples], {"0": 0}, steps, contextlib.nullcontext).sums
        old_kl.append(sums.old_kl / sums.tokens)
        kl.append(sums.kl / sums.tokens)
    assert old_kl[0] == pytest.approx(kl[0], rel=1e-5), "gap 0"
    assert old_kl[1] == pytest.approx(kl[1], rel=1e-5), "gap 1: the behaviour policy is one update old"
    assert old_kl[2] == pytest.approx(kl[2] / 2, rel=1e-3), "gap 2: half way"
    assert old_kl[3] == pytest.approx(kl[3] / 8, rel=1e-3), "gap 8: an eighth is left"


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_aggregation(aggregation: str, ranks: Ranks, samples: list[Sample], model_dir: str) -> None:
    learned, moved = learn(config(actor={"loss_agg_mode": aggregation}), ranks, samples, model_dir)
    assert np.isfinite(learned.sums.vector()).all()
    assert moved > 0


def test_the_entropy_bonus_raises_entropy(ranks: Ranks, samples: list[Sample]) -> None:
    """With nothing but the bonus, a step makes the policy less certain."""
    equal = [
        Sample(s.prompt, [_with_reward(t, 0.5) for t in s.trajectories], s.owner, s.attempt) for s in samples
    ]
    c = config(actor={"entropy_coeff": 1.0})
    model = equivalence.build("llama-tied").float()
    part = learnable(model, c.actor.optim)
    updater = Updater(c, model, part.optimizer, part.schedule, ranks, pad_id=0)
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


CUT_DEPENDENT = {"m2po", "kl_cov"}
"""They choose tokens within a micro-batch."""


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [(loss, None) for loss in sorted(LOSSES - CUT_DEPENDENT)] + [("ppo", a) for a in sorted(AGGREGATIONS)],
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
        model = equivalence.build("llama-tied")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        updater = Updater(c, model, optimizer, schedule, ranks, pad_id=0)
        (rows,) = with_advantages(c, [samples], ranks)
        for row in rows:
            row.ref_log_probs = row.trajectory.log_probs - 0.25
        updater.begin_window()
        updater.recompute_old([rows])
        assert updater.step(rows[::turn], UpdateSums())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    whole, cut = grads
    assert float((whole - cut).norm() / whole.norm()) < 1e-9


def test_overlong_responses_are_punished(samples: list[Sample]) -> None:
    c = config(algorithm={"adv_estimator": "reinforce_plus_plus", "overlong_buffer_len": 4})
    plain = config(algorithm={"adv_estimator": "reinforce_plus_plus"})
    (punished,), (free,) = with_advantages(c, [samples]), with_advantages(plain, [samples])
    longest = max(range(len(free)), key=lambda i: free[i].span.stop - free[i].span.start)
    assert len(free[longest].trajectory.token_ids) == 14
    assert punished[longest].advantages[-1] < free[longest].advantages[-1]


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


def test_recomputed_log_probs_are_those_of_the_window_start(ranks: Ranks, samples: list[Sample]) -> None:
    """After local updates: old is what the weights at the window's start say, and nothing else changes."""
    c = config(async_training={"use_rollout_log_probs": False})
    model = equivalence.build("llama-tied").float()
    part = learnable(model, c.actor.optim)
    updater = Updater(c, model, part.optimizer, part.schedule, ranks, pad_id=0)
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
    state = [t.clone() for s in part.optimizer.state.values() for t in s.values()]
    updater.recompute_old([rows])
    for before, row in zip(first, rows, strict=True):
        np.testing.assert_array_equal(before, row.old_log_probs)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), live, strict=True))
    after = [t for s in part.optimizer.state.values() for t in s.values()]
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
def test_rollout_correction(
    correction: dict[str, Any], ranks: Ranks, samples: list[Sample], model_dir: str
) -> None:
    c = config(algorithm={"rollout_correction": correction}, async_training={"use_rollout_log_probs": False})
    learned, moved = learn(c, ranks, samples, model_dir)
    assert np.isfinite(learned.sums.vector()).all()
    assert moved > 0
