"""A field says how long its value holds; what a run may change, and when, follows from that alone."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import pytest

from headrace.config import identity, loading, tuning
from headrace.config import lifetime as config_lifetime
from headrace.config.base import INITIAL, LIVE, RUN, START, Section
from headrace.config.run import RunConfig
from headrace.records.layout import RunLayout
from headrace.reference.config import render
from tests.support.scripted_turns import config

OTHER: dict[str, Any] = {
    "name": "another",
    "seed": 7,
    "model.path": "/elsewhere/other",
    "model.dtype": "bfloat16",
    "data.train_files": ["other.jsonl"],
    "data.val_files": ["other.jsonl"],
    "data.skip_invalid": True,
    "data.ground_truth_as_json": True,
    "data.max_prompt_length": 77,
    "data.truncation": "skip",
    "data.filter_overlong_prompts": True,
    "data.max_response_length": 77,
    "data.chat_template": "other.jinja",
    "data.apply_chat_template_kwargs": {"enable_thinking": False},
    "data.shuffle": False,
    "rollout.n": 7,
    "rollout.total_rollout_steps": 777,
    "actor.ppo_mini_batch_size": 7,
    "critic.enable": True,
    "actor.optim.optimizer": "sgd",
    "critic.optim.optimizer": "sgd",
    "environment.name": "other",
    "environment.path": "other.py",
    "environment.kwargs": {"other": 1},
    "val.n": 7,
    "redis.url": "redis://other:1/0",
}


def changed(**values: Any) -> RunConfig:
    """Without the checks of a file: alone, some of these do not fit the rest."""
    out = config().model_copy(deep=True)
    for key, value in values.items():
        *sections, leaf = key.split(".")
        setattr(functools.reduce(getattr, sections, out), leaf, value)
    return out


def test_a_field_has_its_own_lifetime_or_that_of_its_section() -> None:
    class Inner(Section):
        plain: int = 1
        fixed: Annotated[int, RUN] = 1

    class Outer(Section):
        plain: int = 1
        tuned: Annotated[Inner, LIVE] = Inner()
        scaled: Annotated[int, INITIAL] = 1

    assert dict(config_lifetime.walk(Outer)) == {
        "plain": START,
        "tuned.plain": LIVE,
        "tuned.fixed": RUN,
        "scaled": INITIAL,
    }


def test_two_lifetimes_are_an_error() -> None:
    class Both(Section):
        field: Annotated[int, RUN, LIVE] = 1

    with pytest.raises(TypeError, match="one lifetime, not run and live"):
        dict(config_lifetime.walk(Both))


def test_every_key_has_one() -> None:
    assert list(config_lifetime.by_key()) == loading.known_keys()
    assert {lifetime.name for lifetime in config_lifetime.by_key().values()} == {
        "run",
        "start",
        "live",
        "initial",
    }


@pytest.mark.parametrize("key", config_lifetime.keys("run"))
def test_a_resume_with_another_value_is_refused_with_both(key: str, tmp_path: Path) -> None:
    """By the run's directory, and where the ledger notes the value, by every service too."""
    layout = RunLayout(tmp_path)
    layout.create()
    loading.write(config(), layout.requested)
    now = changed(**{key: OTHER[key]})
    was, became = (loading.value_at(c, key) for c in (config(), now))
    (line,) = layout.changed_keys(now)
    assert f"{key}: was {was!r} when the run was begun and is {became!r} now" in line
    lines = identity.changes(json.dumps(identity.of(config())), now)
    assert [line.partition(":")[0] for line in lines] == [key] * (key in config_lifetime.in_ledger())


def test_what_a_start_reads_cannot_change_while_the_run_is_on() -> None:
    keys = config_lifetime.keys("start")
    now = changed(**dict.fromkeys(keys, "another"))
    with warnings.catch_warnings():  # pydantic's, about the types
        warnings.simplefilter("ignore")
        assert tuple(line.partition(":")[0] for line in tuning.refused(config(), now)) == keys
        assert tuning.changed(config(), now) == []
    assert identity.changes(json.dumps(identity.of(config())), now) == []


def test_the_number_of_rollouters_is_neither_refused_nor_followed() -> None:
    now = changed(**{"rollout.replicas": 9})
    assert tuning.refused(config(), now) == []
    assert tuning.changed(config(), now) == []


def test_the_page_shows_it() -> None:
    lines = [line for line in render().splitlines() if line.startswith("| `")]
    shown = {line.split("`")[1]: line for line in lines}
    for key, lifetime in config_lifetime.by_key().items():
        assert f" | {lifetime.name} | " in shown[key]
