"""Modules in the working directory are nobody's but their owner's: they change nothing in Headrace."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.service.module_command import module_command, safe_path_for_children
from tests.traps import set_traps, sprung

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(sys.executable).parent
SERVICES = ("queue", "coordinator", "rollouter", "trainer")


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    return set_traps(tmp_path / "work")


def run(traps: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(w) for w in words], cwd=traps, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", SERVICES)
def test_services_start(traps: Path, name: str) -> None:
    """As the local runner starts them."""
    starts(traps, name, *module_command(f"headrace_{name}"))


def test_so_do_they_in_a_container(traps: Path) -> None:
    """All images have scripts of one kind."""
    starts(traps, "queue", SCRIPTS / "headrace-queue")


def starts(traps: Path, name: str, *words: str | Path) -> None:
    done = run(traps, *words, "--help")
    assert (done.returncode, sprung(traps)) == (0, []), done.stderr
    assert f"usage: headrace-{name}" in done.stdout


def test_a_reward_is_found_by_its_path_and_the_traps_are_not(traps: Path) -> None:
    """`validate` runs it in the processes in which a run has it."""
    shutil.copy(ROOT / "headrace" / "demo" / "reward.py", traps / "mine.py")
    config = traps / "run.yaml"
    config.write_text((ROOT / "configs" / "demo.yaml").read_text())
    done = run(
        traps, SCRIPTS / "headrace", "validate", config, "custom_reward_function.path=mine.py",
        "custom_reward_function.name=compute_score",
    )  # fmt: skip
    assert (done.returncode, sprung(traps)) == (0, []), done.stdout + done.stderr


def test_an_algorithm_is_found_by_its_path_and_the_traps_are_not(traps: Path) -> None:
    """It is imported in a process of its own before a run starts."""
    shutil.copy(ROOT / "tests" / "plugins" / "headrace_example" / "algorithm.py", traps / "mine.py")
    config = traps / "run.yaml"
    config.write_text((ROOT / "configs" / "demo.yaml").read_text())
    done = run(traps, SCRIPTS / "headrace", "run", config, "algorithm.modules=[mine.py]", "--dry-run")
    assert (done.returncode, sprung(traps)) == (0, []), done.stdout + done.stderr


def test_what_a_library_starts_is_safe_for_as_long_as_it_is_asked_for(
    traps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM looks at a model's class in `python -m` of its own; a user's programs find their modules."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    command = (sys.executable, "-m", "json.tool", "--help")
    with safe_path_for_children():
        done = run(traps, *command)
    assert (done.returncode, sprung(traps)) == (0, []), done.stderr
    run(traps, *command)
    assert sprung(traps)


def test_the_traps_work(traps: Path) -> None:
    """Without `-P` they are imported."""
    done = run(traps, sys.executable, "-m", "headrace_queue", "--help")
    assert done.returncode != 0
    assert sprung(traps)
