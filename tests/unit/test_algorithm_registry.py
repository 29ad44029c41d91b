"""Names of implementations: unknown ones, taken ones, and ones that a user's file brings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, AdvantageInput, estimate
from headrace.algorithms.policy_loss import POLICY_LOSSES
from headrace.algorithms.registry import Registry, load_module

USER_FILE = """
from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, per_trajectory

@ADVANTAGE_ESTIMATORS.register("test_user_doubled")
def doubled(batch):
    return per_trajectory(batch, 2 * batch.scores())
"""


def test_an_unknown_name_is_answered_by_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown policy loss 'pp0'.*nearest first: ppo, "):
        POLICY_LOSSES.get("pp0")
    with pytest.raises(ValueError, match=r"nearest first: grpo_passk, "):
        ADVANTAGE_ESTIMATORS.get("grpo_pass_k")
    with pytest.raises(ValueError, match="nearest first: none"):
        Registry[int]("number").get("one")


def test_a_taken_name_is_refused() -> None:
    numbers: Registry[int] = Registry("number")
    assert numbers.register("one")(1) == 1
    with pytest.raises(ValueError, match="'one' is registered already"):
        numbers.register("one")(2)
    assert numbers.get("one") == 1
    assert numbers.names() == ["one"]


def test_a_users_file_registers_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    module = load_module(str(file))
    assert load_module(str(file)) is module
    rewards = torch.tensor([[0.0, 1.5]])
    batch = AdvantageInput(rewards, torch.ones_like(rewards), torch.zeros(1, dtype=torch.int64))
    assert estimate("test_user_doubled", batch).advantages.tolist() == [[3.0, 3.0]]


def test_modules_that_cannot_be_loaded(tmp_path: Path) -> None:
    assert load_module("headrace.algorithms.kl").__name__ == "headrace.algorithms.kl"
    with pytest.raises(ValueError, match=r"no module 'no_such_pkg\.x'"):
        load_module("no_such_pkg.x")
    with pytest.raises(ValueError, match="no file"):
        load_module(str(tmp_path / "missing.py"))
    broken = tmp_path / "broken.py"
    broken.write_text("import surely_not_installed_anywhere\n")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
            load_module(str(broken))
