"""Reading the configuration: what is accepted, and what people are told when it is not."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import loading
from headrace.config.loading import ConfigError, load

GOOD: dict[str, Any] = {
    "name": "demo",
    "model": {"path": "demo:spell_backward"},
    "data": {"train_files": ["a.jsonl"], "val_files": ["b.jsonl"]},
    "rollout": {"total_rollout_steps": 64, "n": 4},
    "actor": {"ppo_mini_batch_size": 8},
    "custom_reward_function": {"path": "headrace.demo.reward"},
}


def put(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def errors(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return caught.value.lines


def with_value(dotted: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    *sections, leaf = dotted.split(".")
    node = data
    for part in sections:
        node = node.setdefault(part, {})
    node[leaf] = value
    return data


def test_overrides_are_yaml_and_win(tmp_path: Path) -> None:
    path = put(tmp_path, GOOD)
    config = load(
        path, ["actor.optim.lr=3e-4", "data.train_files=[x, y]", "data.shuffle=false", "data.max_ahead="]
    )
    assert config.actor.optim.lr == 3e-4
    assert config.data.train_files == ["x", "y"]
    assert config.data.shuffle is False
    assert config.data.max_ahead is None


def test_an_exponent_without_a_point_is_a_number(tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD) + "sync: {canary_tolerance: 1e-3}\n"
    assert load(put(tmp_path, text)).sync.canary_tolerance == 1e-3


@pytest.mark.parametrize(
    ("dotted", "meant"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rolout.n", "rollout.n"),
        ("ppo_mini_batch_size", "actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.rollout.replicas", "rollout.replicas"),
        ("actor_rollout_ref.actor.optim.eps", "actor.optim.eps"),
        ("async_training.staleness_treshold", "async_training.staleness_threshold"),
        ("trainer.seed", "seed"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, dotted: str, meant: str) -> None:
    path = put(tmp_path, with_value(dotted, 1))
    assert errors(path) == [f"{path}: {dotted}: unknown key; did you mean {meant}?"]


def test_an_unknown_override_is_the_command_lines(tmp_path: Path) -> None:
    lines = errors(put(tmp_path, GOOD), "trainer.resum=never")
    assert lines == ["command line: trainer.resum: unknown key; did you mean trainer.resume?"]


@pytest.mark.parametrize(
    ("dotted", "value", "told"),
    [
        ("trainer.device", "gpu", "'gpu' is not possible; set it to 'cpu' or 'cuda'"),
        ("rollout.n", 0, "0 is not possible; set it to a value greater than 0"),
        ("seed", "x", "'x' is not possible; set it to a valid integer"),
        ("model", "here", "'here' is not possible; write a section with keys below it"),
        ("data.train_files", [], "[] is not possible; name at least one"),
        ("name", "a/b", "'a/b' is not possible; use up to 63 letters"),
    ],
)
def test_a_bad_value_says_what_is_possible(tmp_path: Path, dotted: str, value: Any, told: str) -> None:
    path = put(tmp_path, with_value(dotted, value))
    (line,) = errors(path)
    assert line.startswith(f"{path}: {dotted}: ")
    assert told in line


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    data = with_value("rollout.n", 0)
    del data["actor"]["ppo_mini_batch_size"]
    lines = errors(put(tmp_path, data))
    assert len(lines) == 2
    assert lines[1].endswith("actor.ppo_mini_batch_size: not set, but it has no default; add it")


def test_what_does_not_fit_together(tmp_path: Path) -> None:
    path = put(tmp_path, GOOD)
    (line,) = errors(path, "rollout.n=1")
    assert line.startswith(f"{path}: rollout.n is 1")
    assert "set rollout.n to 2" in line


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    assert "secret" not in "\n".join(errors(put(tmp_path, GOOD), "redis.url=http://:secret@host"))
    config = load(put(tmp_path, GOOD), ["redis.url=redis://:secret@host/0"])
    loading.write(config, tmp_path / "config.yaml")
    assert "secret" not in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: [\n", ":3:1: not readable as YAML"),
        ("seed: 1\nseed: 2\n", ":2:1: not readable as YAML: 'seed' is set twice"),
        ("- 1\n", ": holds a list; write key: value lines"),
        ("a: !!python/object:os.system {}\n", "not readable as YAML"),
    ],
)
def test_what_is_no_configuration(tmp_path: Path, text: str, told: str) -> None:
    path = put(tmp_path, text)
    (line,) = errors(path)
    assert line.startswith(str(path))
    assert told in line


def test_no_file(tmp_path: Path) -> None:
    (line,) = errors(tmp_path / "none.yaml")
    assert "no such file" in line


@pytest.mark.parametrize(
    "text", ["rollout.n", "=3", "rollout..n=3", "name.x=1", "seed=[", "data.train_files.0=x"]
)
def test_a_bad_override(tmp_path: Path, text: str) -> None:
    assert errors(put(tmp_path, GOOD), text)[0].startswith("command line: ")


def test_written_and_read_again_it_is_the_same(tmp_path: Path) -> None:
    config = load(put(tmp_path, GOOD), ["seed=7"])
    loading.write(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


def test_every_key_is_known_by_its_own_name() -> None:
    keys = loading.known_keys()
    assert "rollout.engine.max_num_seqs" in keys
    assert all(loading.nearest(key) in keys for key in keys)


def test_a_further_file_changes_the_keys_in_it(tmp_path: Path) -> None:
    """Sections are merged; what comes later wins; an error names the file that set the key."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text((Path(__file__).parents[3] / "configs" / "demo.yaml").read_text())
    second.write_text("rollout:\n  n: 5\nasync_training:\n  staleness_threshold: 0.125\n")
    config = load(first, [str(second), "rollout.n=6"])
    assert (config.rollout.n, config.async_training.staleness_threshold) == (6, 0.125)
    assert config.rollout.replicas == 2, "keys that it does not name stay"
    assert load(first, ["rollout.n=6", str(second)]).rollout.n == 5
    second.write_text("rollout:\n  n: none\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(str(second))}: rollout\.n"):
        load(first, [str(second)])
    with pytest.raises(ConfigError, match="no such file"):
        load(first, ["missing.yaml"])
