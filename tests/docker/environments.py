"""The images' install steps without an image: the same locks and the same files in a clean environment."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
SERVICES = ("queue", "coordinator", "trainer", "rollouter")
PACKAGES = {
    "queue": "headrace_queue",
    "coordinator": "headrace_coordinator",
    "trainer": "headrace_trainer",
    "rollouter": "headrace_rollouter",
}


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


def install(service: str, folder: Path, context: Path) -> Path:
    """A clean environment with what the CPU image of `service` holds; returns its interpreter."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    needs_torch = service in ("trainer", "rollouter")
    if needs_torch:
        _pip(python, "--extra-index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu")
    locks = DOCKER / "locks"
    _pip(python, "-r", str(locks / "build.txt"), "-r", str(locks / f"{service}.txt"))
    _pip(python, "--no-build-isolation", str(context))
    return python


def _pip(python: Path, *words: str) -> None:
    # Neither a pip of its own nor compiled files: both only cost time here.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    command = [*pip, "install", "-q", "--no-deps", "--no-compile", *words]
    done = subprocess.run(command, env=bare(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def bare() -> dict[str, str]:
    """The environment without what would let a package of the tests' own environment slip in."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
