"""docs/tutorial.md as a reader follows it, up to the run itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.docs_commands import ROOT, TUTORIAL, of_page

PAGE = ROOT / "docs" / TUTORIAL
FILES = ROOT / "docs" / "examples" / "tutorial"


def shown(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Output by command, of those that come before or instead of the run, in a folder like the clone."""
    clone = tmp_path_factory.mktemp("clone")
    (ROOT / ".cache").mkdir(exist_ok=True)
    for name in ("docs", "configs", ".cache"):
        (clone / name).symlink_to(ROOT / name)
    said = {}
    for command in of_page(PAGE):
        words = shlex.split(command)
        if words[0] == "make" or words == [".venv/bin/headrace", "run", "mine/run.yaml"] or "echo" in words:
            continue
        if words[0].startswith(".venv/bin/"):
            start = {"python": [], "headrace": ["-m", "headrace.cli.main"]}[words[0].rpartition("/")[2]]
            words[:1] = [sys.executable, *start]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:]), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            words, cwd=clone, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, (command, done.stdout + done.stderr)
        said[command] = done.stdout
    said["row"] = (clone / "mine" / "train.jsonl").read_text()
    return said


def test_it_comes_to_a_run(followed: dict[str, str]) -> None:
    validated = next(text for command, text in followed.items() if " validate " in command)
    assert "no problems; nothing was started" in validated
    assert len(re.findall(r"ground truth 1, empty 0$", validated, re.MULTILINE)) == 3
    plans = [text for command, text in followed.items() if "--dry-run" in command]
    assert "updates: 200" in plans[0]
    assert all("nothing was started" in plan for plan in plans)


def test_the_page_shows_the_files(followed: dict[str, str]) -> None:
    assert shown("yaml") == [(FILES / "run.yaml").read_text()]
    (reward,) = shown("python")
    assert reward in (FILES / "reward.py").read_text()
    (row,) = shown("json")
    assert json.loads(row) in [json.loads(line) for line in followed["row"].splitlines()]


def test_the_reward_grades() -> None:
    names: dict[str, object] = {}
    exec(shown("python")[0], names)
    score = names["compute_score"]
    assert callable(score)
    assert [score("echo", text, "heey")["score"] for text in ("heey", "heex", "yeeh", "")] == [
        1,
        0.375,
        0.25,
        0,
    ]
