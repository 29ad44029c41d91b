"""What a run that goes on must keep, as its directory remembers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import loading
from headrace.config.run import RunConfig
from headrace.records.layout import RunLayout
from tests.support.scripted_turns import config


def begun(root: Path, **environment: Any) -> RunLayout:
    layout = RunLayout(root)
    layout.create()
    loading.write(config(**environment), layout.requested)
    return layout


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"kwargs": {"role": "tool"}}, ["kwargs"]),
        ({"name": "Other", "path": "mine.py"}, ["name", "path"]),
        ({"name": "single_turn"}, ["name"]),
        ({}, []),
        ({"max_turns": 3, "step_timeout_s": 7.0}, []),
    ],
)
def test_a_run_keeps_its_environment(tmp_path: Path, settings: dict[str, Any], changed: list[str]) -> None:
    lines = begun(tmp_path).changed_keys(config(**settings))
    assert [f" environment.{leaf}: was " in line for leaf, line in zip(changed, lines, strict=True)] == [
        True for _ in changed
    ]


def test_a_run_from_before_there_were_environments_goes_on(tmp_path: Path) -> None:
    layout = begun(tmp_path)
    plain = yaml.safe_load(layout.requested.read_text())
    del plain["environment"]
    layout.requested.write_text(yaml.safe_dump(plain))
    now = RunConfig.model_validate(config().model_dump() | {"environment": {}})
    assert layout.changed_keys(now) == []
