"""The images' install steps without an image: the same commands, locks and files in a clean environment."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.deploy.docker.dockerfiles import ENVIRONMENT, ROOT, Command, commands, text_of

PACKAGES = {
    "queue": "headrace_queue",
    "coordinator": "headrace_coordinator",
    "trainer": "headrace_trainer",
    "rollouter": "headrace_rollouter",
}
LATE = {
    "queue": ["headrace.rewards.reasoning_gym_score", "headrace.rewards.math_verify_score", "datasets"],
    "coordinator": ["kubernetes"],
    "trainer": ["tensorboard", "wandb"],
    "rollouter": ["headrace.rewards.reasoning_gym_score", "headrace.rewards.math_verify_score"],
}
"""What a service imports only when its configuration asks for it."""
PYTHONS = {f"{ENVIRONMENT}/bin/python", "python3"}
NOT_HERE = {"apt-get", "rm"}
"""Commands that concern the image's own file system; what they do is checked by reading."""


def build_context(target: Path) -> Path:
    """What `COPY . /source` copies: the tracked files that .dockerignore lets through."""
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*", "the rest of this function reads a list of exceptions"
    kept = [line[1:] for line in lines if line.startswith("!")]
    out = [line.removeprefix("**/") for line in lines[1:] if not line.startswith("!")]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *kept],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if any(fnmatch.fnmatch(part, pattern) for part in Path(name).parts for pattern in out):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    return target


def install(service: str, folder: Path, context: Path, device: str = "cpu") -> Path:
    """A clean environment with what the image of `service` holds; returns its interpreter.

    Where the Dockerfile makes no environment (it installs into that of vLLM's image) `folder` has to be one.
    """
    python = folder / "bin" / "python"
    for command in commands(text_of(service), device):
        if command.words[0] not in NOT_HERE:
            _run(command, python, context)
    return python


def import_late(service: str, python: Path) -> None:
    """Fails when the environment lacks what the service imports late."""
    done = subprocess.run(
        [python, "-c", "import " + ", ".join(LATE[service])],
        env=bare(), cwd=python.parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{service}: {done.stderr}"


def _run(command: Command, python: Path, context: Path) -> None:
    there = {image: str(context / path) for image, path in command.files.items()}
    words = [there.get(word, word) for word in command.words]
    missing = [word for word in words if word.startswith("/locks/") and word != "/locks/before.txt"]
    assert not missing, f"{' '.join(command.words)}: no COPY brings {', '.join(missing)}"
    if words == ["python", "-m", "venv", ENVIRONMENT]:
        # Neither a pip of its own nor compiled files: both only cost time here.
        words = [sys.executable, "-m", "venv", "--without-pip", str(python.parents[1])]
    elif words[0] == f"{ENVIRONMENT}/bin/pip" or words[:3] == ["python3", "-m", "pip"]:
        what, *rest = words[1:] if words[0] != "python3" else words[3:]
        words = [sys.executable, "-m", "pip", what, "-q", *["--no-compile"] * (what == "install"), *rest]
    else:
        assert words[0] in PYTHONS, f"a step that is not known here: {' '.join(command.words)}"
        before = str(python.parents[1] / "before.txt")
        words = [sys.executable, *(before if word == "/locks/before.txt" else word for word in words[1:])]
    env = {**bare(), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PYTHON": str(python)}
    if "venv" in words:
        env.pop("PIP_PYTHON")
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"


def bare() -> dict[str, str]:
    """The environment without what would let a package of the tests' own environment slip in."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
