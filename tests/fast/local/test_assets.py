"""What becomes of the paths in a configuration before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace.config.run import RunConfig
from headrace.local import assets


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train_files": ["rows.jsonl"], "max_prompt_length": 8, "max_response_length": 8},
            "rollout": {"total_rollout_steps": 8, "test_freq": 0},
            "actor": {"ppo_mini_batch_size": 8},
            "custom_reward_function": {"path": "~/reward.py"},
            **sections,
        }
    )


def test_the_home_directory_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = assets.absolute(config(environment={"path": "~/env.py", "name": "Mine"}, runs_dir="~/runs"))
    assert found.custom_reward_function.path == str(tmp_path / "reward.py")
    assert found.environment.path == str(tmp_path / "env.py")
    assert found.runs_dir == str(tmp_path / "runs")


def test_an_environment_of_one_s_own_needs_its_name() -> None:
    with pytest.raises(ValidationError, match=r"set environment\.name too, to the class .* in env\.py"):
        config(environment={"path": "env.py"})


def test_modules_and_addresses_stay_as_they_are() -> None:
    data = {"train_files": ["hf://datasets/x"], "max_prompt_length": 8, "max_response_length": 8}
    mine = {"path": "package.module", "name": "Mine"}
    found = assets.absolute(config(data=data, environment=mine))
    assert found.data.train_paths == ["hf://datasets/x"]
    assert found.environment.path == "package.module"
