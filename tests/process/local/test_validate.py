"""`headrace validate`: what it finds without starting anything, on a real tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from headrace.cli.main import parse
from headrace.cli.validate import JSON
from headrace.config.run import RunConfig
from headrace.demo import spell_backward
from headrace.local import scratch, trial
from headrace.local.trial import Trial
from headrace.models import checks as model_checks
from tests.support import tiny_models
from tests.waiting import until

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
GRADED = "return float(solution_str == ground_truth)\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    tiny_models.save("llama", directory)
    spell_backward.build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A configuration in which everything is right."""
    spell_backward.write_rows(tmp_path / "train.jsonl", ["sun", "moon", "stars", "comet"], "train")
    spell_backward.write_rows(tmp_path / "val.jsonl", ["cloud"], "val")
    (tmp_path / "reward.py").write_text(REWARD + GRADED)
    return {
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train_files": [str(tmp_path / "train.jsonl")],
            "val_files": [str(tmp_path / "val.jsonl")],
            "max_prompt_length": 16,
            "max_response_length": 16,
        },
        "rollout": {"total_rollout_steps": 16},
        "actor": {"ppo_mini_batch_size": 4},
        "custom_reward_function": {"path": str(tmp_path / "reward.py"), "timeout_s": 0.5},
    }


def validate(settings: dict[str, Any], tmp_path: Path, *words: str) -> int:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    args = parse(["validate", str(file), *words])
    code: int = args.main(args)
    return code


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes seconds to import; one test does it."""
    monkeypatch.setattr(model_checks, "_engine", lambda path, found: None)


def test_everything_right(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every part real, the process of its own included."""
    (tmp_path / "reward.py").write_text("print('a line of the module')\n" + REWARD + GRADED)
    assert validate(settings, tmp_path, "--json", "--timeout", "200") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["problems"]) == (True, [])
    assert found["model"]["class"] == "LlamaForCausalLM"
    assert found["model"]["parameters"] == found["memory"]["parameters"] > 50_000
    assert found["model"]["eos"] == {"<eos>": 2}
    assert found["data"]["train_files"] == {
        "rows": 4,
        "left_out": 0,
        "tokenised": 4,
        "prompt_tokens": {"median": 6.5, "longest": 7},
    }
    rows = found["reward"]["rows"]
    assert [row["scores"] for row in rows] == [{"ground_truth": 1.0, "empty": 0.0}] * 3
    assert rows[0]["row"].endswith("train.jsonl:1")
    assert found["plan"]["processes"][-1] == "trainer"
    assert found["plan"]["samples_per_sync"] == 4
    assert not (tmp_path / "runs").exists()
    assert set(found) == set(JSON)
    documented = {key: set(re.findall(r"`(\w+)`", text)) for key, text in JSON.items()}
    for key in ("model", "plan", "memory", "batches", "gpus"):
        asked = {"nodes_given", "rollouters_held"}  # with --nodes
        assert documented[key] - {"data", "reward"} - asked == set(found[key]), key
    data = {key for part in found["data"].values() for key in part}
    assert documented["data"] == {*found["data"], *data}
    assert documented["reward"] == {*found["reward"], *rows[0]}


def test_what_preflight_finds_is_told_and_ends_the_checks(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings["data"]["train_files"] = [str(tmp_path / "none.jsonl")]
    settings["model"]["path"] = str(tmp_path)
    assert validate(settings, tmp_path) == 2
    printed = capsys.readouterr()
    assert "none.jsonl" in printed.err
    assert "no config.json" in printed.err
    assert "mode: on_policy_pipeline" in printed.out
    assert printed.out.splitlines()[-1].endswith("problems; nothing was started")


def test_a_configuration_that_cannot_be_read_as_json(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings["rollout"]["nn"] = 3
    assert validate(settings, tmp_path, "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert "rollout.nn" in found["problems"][0]


def test_checks_that_take_too_long_are_given_up(settings: dict[str, Any]) -> None:
    found = trial.run(RunConfig.model_validate(settings), timeout_s=0.0)
    assert found["model"].problems == ["model: was not checked within 0 s (--timeout)"]


TRIES = """
import sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from headrace.config.run import RunConfig
from headrace.local import scratch, trial
scratch._parents = lambda: [Path(sys.argv[1])]
trial.run(RunConfig.model_validate_json(sys.stdin.read()), 600.0)
"""


def test_a_check_that_is_killed_leaves_nothing(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the process that runs the code of model and reward have the run's secrets."""
    monkeypatch.setenv("HEADRACE_TOKEN", "secret")
    tried = RunConfig.model_validate(settings).model_dump_json()
    command = [sys.executable, "-c", TRIES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as caller:
        assert caller.stdin is not None
        caller.stdin.write(tried)
        caller.stdin.close()
        (trying,) = until(lambda: psutil.Process(caller.pid).children(), "the trial's process")
        until(lambda: "headrace.local.trial" in trying.cmdline(), "it to be what it will be")
        assert "TMPDIR" in trying.environ()
        assert "HEADRACE_TOKEN" not in trying.environ()
        caller.kill()
    until(lambda: not trying.is_running(), "the trial's end", 5.0)  # by itself it would go on for long
    assert len(list(tmp_path.glob(f"{scratch.PREFIX}*"))) == 1
    monkeypatch.setattr(scratch, "_parents", lambda: [tmp_path])
    scratch.create().remove()
    assert list(tmp_path.glob(f"{scratch.PREFIX}*")) == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ValueError('no such task')\n", r"train.jsonl:1: scoring the ground truth: .*no such task"),
        ("return float('nan')\n", "the reward returned nan"),
        ("import time; time.sleep(600)\n", "took longer than 0.5 s"),
        ("return len(solution_str) / len(solution_str)\n", "scoring an empty answer: .*ZeroDivisionError"),
    ],
)
def test_a_reward_that_fails_on_rows(
    body: str, told: str, settings: dict[str, Any], tmp_path: Path, without_vllm: None
) -> None:
    (tmp_path / "reward.py").write_text(REWARD + body)
    checks = Trial(RunConfig.model_validate(settings))
    checks.data()
    found = checks.reward()
    assert any(re.search(told, problem) for problem in found.problems), found.problems


def test_rows_of_an_array_are_counted_as_the_data_checks_do(settings: dict[str, Any], tmp_path: Path) -> None:
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.json").write_text(f"[{', '.join(lines)}]")
    settings["data"]["train_files"] = [str(tmp_path / "train.json")]
    checks = Trial(RunConfig.model_validate(settings))
    checks.data()
    assert checks.reward().facts["rows"][0]["row"].endswith("train.json, row 0")


def test_a_reward_that_tells_nothing_apart(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD + "return 0.25\n")
    checks = Trial(RunConfig.model_validate(settings))
    checks.data()
    (warning,) = checks.reward().warnings
    assert "scores as an empty answer does, 0.25" in warning


def test_prompts_that_are_too_long(settings: dict[str, Any], without_vllm: None) -> None:
    settings["data"]["max_prompt_length"] = 5
    checks = Trial(RunConfig.model_validate(settings))
    assert checks.model().problems == []
    problems = checks.data().problems
    assert any("train.jsonl:2" in problem for problem in problems), problems


def test_a_model_whose_parts_do_not_belong_together(
    settings: dict[str, Any], tmp_path: Path, without_vllm: None
) -> None:
    directory = tmp_path / "mixtral"
    model = tiny_models.save("mixtral", directory)
    tokenizer = spell_backward.build_tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(80)])
    tokenizer.eos_token = "<7>"
    tokenizer.save_pretrained(directory)
    settings["model"]["path"] = str(directory)
    found = Trial(RunConfig.model_validate(settings)).model()
    assert found.facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert any("this architecture is not supported" in problem for problem in found.problems)
    assert any("the tokenizer has 112 tokens, the model 96" in problem for problem in found.problems)
    assert any("at which the engine will not stop" in warning for warning in found.warnings)
