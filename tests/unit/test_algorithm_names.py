"""The names that a configuration may use are the registries' own; nonsense is refused with a reason."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from headrace import algorithm_names as names
from headrace.algorithms.aggregation import AGGREGATIONS
from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS
from headrace.algorithms.kl import KL_PENALTIES
from headrace.algorithms.policy_loss import POLICY_LOSSES, PolicyLossSettings
from headrace.algorithms.rejection import REJECTION_CRITERIA
from headrace.config import RunConfig

NOT_NUMBERS = {"clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "sequence_ratio", "behaviour_filter",
               "rollout_correction", "extra"}  # fmt: skip


def test_every_registered_name_can_be_configured() -> None:
    assert set(ADVANTAGE_ESTIMATORS.names()) == set(names.ESTIMATORS)
    assert set(POLICY_LOSSES.names()) == names.LOSSES
    assert set(KL_PENALTIES.names()) == names.KL_PENALTIES
    assert set(REJECTION_CRITERIA.names()) == names.REJECTION_CRITERIA
    assert set(AGGREGATIONS.names()) == names.AGGREGATIONS
    assert {f.name for f in fields(PolicyLossSettings)} - NOT_NUMBERS == names.LOSS_SETTINGS


def config(**sections: dict[str, Any]) -> RunConfig:
    plain: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_files": ["a"], "max_prompt_length": 8, "max_response_length": 8},
        "rollout": {"total_rollout_steps": 8, "test_freq": 0},
        "actor": {"ppo_mini_batch_size": 2},
        "custom_reward_function": {"path": "r"},
    }
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **values}
    return RunConfig.model_validate(plain)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"algorithm": {"adv_estimator": "gae"}}, "needs a critic"),
        ({"algorithm": {"adv_estimator": "optimal_token_baseline"}}, "use_rollout_log_probs to false"),
        ({"critic": {"enable": True}}, "uses no values"),
        ({"rollout": {"top_p": 0.9}}, "renormalised|kept tokens only"),
        ({"rollout": {"top_k": 40}}, "kept tokens only"),
        (
            {
                "rollout": {"top_p": 0.9},
                "async_training": {"use_rollout_log_probs": False},
                "algorithm": {"rollout_correction": {"rollout_is": "token"}},
            },
            "rollout correction compares",
        ),
        ({"actor": {"prox_logp_method": "loglinear"}}, "is for actor.policy_loss = decoupled_ppo"),
        (
            {
                "actor": {"policy_loss": "decoupled_ppo", "prox_logp_method": "loglinear"},
                "async_training": {"use_rollout_log_probs": False},
            },
            "needs no recomputed log-probs",
        ),
        (
            {
                "actor": {"policy_loss": "bypass_ppo_clip"},
                "async_training": {"use_rollout_log_probs": False},
            },
            "takes the engine's log-probs",
        ),
        ({"actor": {"use_kl_loss": True, "kl_loss_type": "k4"}}, "k4 is unknown"),
        ({"algorithm": {"use_kl_in_reward": True, "kl_penalty": "full"}}, "full is unknown"),
        ({"algorithm": {"gdpo_reward_keys": ["a"]}}, "adv_estimator = gdpo"),
        (
            {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "use_kl_in_reward": True}},
            "parts of the reward as they are",
        ),
        (
            {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "horizon": 3}}},
            "raise it above 3",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_rs": "tokn_k9", "rollout_rs_threshold": 2}}},
            "tokn_k9 is unknown",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": "abc"}}},
            "is no threshold",
        ),
        (
            {
                "algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "1_2_3"}},
                "async_training": {"use_rollout_log_probs": False},
            },
            "is no threshold",
        ),
        (
            {
                "algorithm": {
                    "rollout_correction": {
                        "rollout_rs": "token_k1,seq_mean_k3,token_k2",
                        "rollout_rs_threshold": "2,3",
                    }
                }
            },
            "2 for 3 criteria",
        ),
        (
            {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "gdpo_reward_weights": []}},
            "one for each",
        ),
        ({"algorithm": {"adv_estimator": "grop"}}, "did you mean grpo"),
        ({"algorithm": {"adv_estimator": "grpo_passk"}, "rollout": {"n": 1}}, "set rollout.n to 2"),
        ({"actor": {"policy_loss": "decoupled_ppo"}}, "needs a proximal policy"),
        ({"algorithm": {"rollout_correction": {"rollout_is": "token"}}}, "weigh the ratio twice"),
        ({"algorithm": {"rollout_correction": {"rollout_rs": "token_k1"}}}, "needs a rollout_rs_threshold"),
        (
            {
                "algorithm": {"filter_groups": {"enable": True}, "adv_estimator": "reinforce_plus_plus"},
                "rollout": {"n": 1},
            },
            "needs groups",
        ),
        ({"actor": {"policy_loss": "gspoo"}}, "did you mean gspo"),
        ({"actor": {"loss_agg_mode": "token_mean"}}, "did you mean token-mean"),
        ({"actor": {"policy_loss_settings": {"tau_neq": 1.0}}}, "did you mean tau_neg"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        config(**sections)


def test_a_group_of_one_suits_estimators_that_compare_nobody() -> None:
    assert config(algorithm={"adv_estimator": "reinforce_plus_plus"}, rollout={"n": 1}).rollout.n == 1


def test_modules_allow_names_of_their_own() -> None:
    assert config(algorithm={"adv_estimator": "mine", "modules": ["m"]}).algorithm.adv_estimator == "mine"
    with pytest.raises(ValueError, match="needs a critic"):
        config(algorithm={"adv_estimator": "gae", "modules": ["m"]})
