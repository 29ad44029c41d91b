"""The names that a configuration may use are the registries' own; nonsense is refused with a reason."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms import rejection
from headrace.algorithms.policy_loss import PolicyLossSettings
from headrace.algorithms.registries import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    KL_PENALTIES,
    LOSS_SETTINGS,
    POLICY_LOSSES,
    REJECTION_CRITERIA,
)
from headrace.config.algorithm_checks import AlgorithmError, load_algorithms, load_estimator
from headrace.config.redis_memory import largest_sample_bytes
from headrace.config.run import RunConfig
from headrace.local.plugin_probe import problems
from headrace.plugins.registry import Registry
from headrace.wire.sample_checks import SampleReader

NOT_NUMBERS = {"clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "sequence_ratio", "behaviour_filter",
               "rollout_correction", "extra"}  # fmt: skip


def test_every_registered_name_can_be_used() -> None:
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        for name, shipped in registry._shipped.items():
            assert registry.get(name) == shipped
            module, _, function = str(shipped.function).partition(":")
            assert callable(getattr(importlib.import_module(module), function))
    for functions in (KL_PENALTIES, AGGREGATIONS):
        assert all(callable(functions.get(name)) for name in functions.names())
    assert set(rejection.REJECTION_CRITERIA.names()) == REJECTION_CRITERIA
    assert {f.name for f in fields(PolicyLossSettings)} - NOT_NUMBERS == LOSS_SETTINGS


def test_names_and_needs_are_known_without_torch() -> None:
    """The queue service and the coordinator have none."""
    told = (
        "import sys, headrace.config.run, headrace.config.algorithm_checks; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0


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


OWN = """
from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, Estimator
from headrace.algorithms.policy_loss import POLICY_LOSSES
from headrace.algorithms.registries import AGGREGATIONS
from headrace.algorithms.aggregation import token_sum
from headrace.algorithms.reward_to_go import remax_advantages
from headrace.algorithms.sequence_losses import gspo

ADVANTAGE_ESTIMATORS.register("test_my_remax")(remax_advantages)
POLICY_LOSSES.register("test_my_gspo")(gspo)
POLICY_LOSSES.register("test_settings", settings=("test_weight",))(gspo)
AGGREGATIONS.register("test_my_sum")(token_sum)

@ADVANTAGE_ESTIMATORS.register("test_needs_values", values=True, smallest_group=3)
def needs_values(batch):
    raise NotImplementedError
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Names are for the life of the process; none is left behind for other tests."""
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    registries: list[Registry[Any]] = [ADVANTAGE_ESTIMATORS, POLICY_LOSSES, AGGREGATIONS]
    with pytest.MonkeyPatch.context() as patch:
        for registry in registries:
            patch.setattr(registry, "_entries", dict(registry._entries))
        yield str(file)


def test_names_are_checked_once_the_modules_are_there(own: str) -> None:
    """Before, a name may be one of theirs; what is known of the shipped ones is checked all the same."""
    mistyped = config(algorithm={"adv_estimator": "test_my_remx", "modules": [own]})
    with pytest.raises(ValueError, match="needs a critic"):
        config(algorithm={"adv_estimator": "gae", "modules": [own]})
    with pytest.raises(ValueError, match="did you mean tau_neg"):
        config(actor={"policy_loss_settings": {"tau_neq": 1.0}}, algorithm={"modules": [own]})
    assert any("test_my_remx is unknown; did you mean test_my_remax" in p for p in problems(mistyped))
    with pytest.raises(AlgorithmError, match=rf"did you mean test_my_remax\? \({own} registers no such name"):
        load_algorithms(mistyped)
    with pytest.raises(ValueError, match="did you mean test_my_sum"):
        config(actor={"loss_agg_mode": "test_my_sun"}, algorithm={"modules": [own]})


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"algorithm": {"adv_estimator": "test_needs_values"}}, "needs a critic"),
        ({"algorithm": {"adv_estimator": "test_needs_values"}, "rollout": {"n": 2}}, "set rollout.n to 3"),
        (
            {"algorithm": {"adv_estimator": "test_my_remax"}, "critic": {"enable": True}},
            "register yours with values=True",
        ),
        (
            {"actor": {"policy_loss": "test_settings", "policy_loss_settings": {"test_wieght": 1.0}}},
            "did you mean test_weight",
        ),
    ],
)
def test_what_one_of_the_users_own_needs_is_checked(own: str, sections: dict[str, Any], told: str) -> None:
    load_algorithms(config(algorithm={"modules": [own]}))
    sections["algorithm"] = {"modules": [own], **sections.get("algorithm", {})}
    with pytest.raises(ValueError, match=told):
        config(**sections)


def test_a_shipped_function_under_another_name_keeps_its_needs(own: str) -> None:
    run = config(
        algorithm={"adv_estimator": "test_my_remax", "modules": [own]}, actor={"policy_loss": "test_my_gspo"}
    )
    load_estimator(run)
    assert run.has_greedy_baseline
    assert SampleReader(run, 8)._has_baseline
    assert POLICY_LOSSES.get("test_my_gspo").aggregation == "seq-mean-token-mean"


def test_a_name_that_is_not_imported_yet_counts_as_wanting_a_greedy_response() -> None:
    one, other = (
        largest_sample_bytes(config(algorithm={"adv_estimator": name, "modules": ["not_imported"]}))
        for name in ("unheard_of", "remax")
    )
    assert one == other > largest_sample_bytes(config())


def test_modules_that_cannot_be_imported_are_a_problem_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("\nimport surely_not_installed\n")
    [problem] = problems(config(algorithm={"modules": [str(file)]}))
    assert problem.startswith(f"algorithm.modules: {file} does not import: ModuleNotFoundError")
    assert problem.endswith("(line 2)")
    file.write_text("import os; os._exit(3)\n")
    [problem] = problems(config(algorithm={"modules": [str(file)]}))
    assert "ended the process with code 3" in problem


def test_shipped_algorithms_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert list(problems(config(algorithm={"adv_estimator": "remax"}))) == []
