"""What may change while a run is on, and what is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import tuning
from headrace.config_load import load
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.notices import ConfigRefused, Notice, Notices, Tuned
from headrace_coordinator.tuning import ConfigWatch
from tests.unit.cli_desk import Desk

BASE: dict[str, Any] = {
    "name": "x",
    "model": {"path": "nowhere"},
    "data": {"train_files": ["nowhere.jsonl"]},
    "rollout": {"n": 2, "total_rollout_steps": 100, "test_freq": 0},
    "actor": {"ppo_mini_batch_size": 4},
    "async_training": {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 2},
    "custom_reward_function": {"path": "headrace.demo.reward"},
}


class FakeDriver:
    def __init__(self) -> None:
        self.notices = Notices()
        self.heard = self.notices.listen()
        self.tunings: list[tuple[int, float]] = []

    def tune(self, found: pb.Tuning) -> None:
        self.tunings.append((found.sync_steps, found.staleness_threshold))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def rewrite(path: Path, **changes: Any) -> None:
    """As `headrace tune` and the kubelet do: another file in its place. `a__b=v` for a.b."""
    text = {section: dict(v) if isinstance(v, dict) else v for section, v in BASE.items()}
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        text.setdefault(section, {})[leaf] = value
    fresh = path.with_suffix(".new")
    fresh.write_text(yaml.safe_dump(text))
    os.replace(fresh, path)


def watch(path: Path) -> tuple[ConfigWatch, FakeDriver]:
    driver = FakeDriver()
    return ConfigWatch(path, load(path), driver), driver  # type: ignore[arg-type]


def heard(driver: FakeDriver) -> Notice:
    return driver.heard.get_nowait()


def test_eta_and_s_are_passed_on(file: Path) -> None:
    watching, driver = watch(file)
    watching.look()
    rewrite(file, async_training__staleness_threshold=0.25, async_training__trigger_parameter_sync_step=3)
    watching.look()
    watching.look()
    assert driver.tunings == [(3, 0.25)]
    assert isinstance(heard(driver), Tuned)
    rewrite(file, rollout__replicas=5)
    watching.look()
    assert driver.tunings == [(3, 0.25), (2, 0.5)], (
        "set back; the number of rollouters is looked at elsewhere"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout__n", 3),
        ("actor__ppo_mini_batch_size", 5),
        ("async_training__partial_rollout", False),
        ("async_training__max_version_gap", 2),
        ("redis__url", "redis://elsewhere:6379/0"),
        ("model__path", "elsewhere"),
    ],
)
def test_anything_else_is_refused_as_a_whole(file: Path, key: str, value: Any) -> None:
    watching, driver = watch(file)
    rewrite(file, async_training__staleness_threshold=0.25, **{key: value})
    watching.look()
    refused = heard(driver)
    assert isinstance(refused, ConfigRefused)
    assert key.replace("__", ".") in refused.reason
    assert driver.tunings == []
    rewrite(file, async_training__staleness_threshold=0.25)
    watching.look()
    assert driver.tunings == [(2, 0.25)], "mended"


def test_what_does_not_fit_together_is_refused(file: Path) -> None:
    watching, driver = watch(file)
    rewrite(file, async_training__staleness_threshold=-1)
    watching.look()
    assert "staleness_threshold" in heard(driver).reason  # type: ignore[union-attr]
    file.write_text("{")
    watching.look()
    assert isinstance(heard(driver), ConfigRefused)
    file.unlink()
    watching.look()
    assert (driver.heard.empty(), driver.tunings) == (True, [])


def test_partial_rollout_does_not_change_by_its_default(file: Path) -> None:
    """Unset it follows eta: turning eta on would turn it on, too."""
    rewrite(file, async_training__staleness_threshold=0.0)
    before = load(file)
    rewrite(file)
    (line,) = tuning.refused(before, load(file))
    assert "async_training.partial_rollout" in line
    assert "write it down" in line


def test_the_command(desk: Desk) -> None:
    assert desk.headrace("tune", "nothing", "a=1")[0] == 2
