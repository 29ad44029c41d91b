"""One run of a benchmark, in a process of its own; what has finished is not run again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def finished_run(name: str, words: Sequence[str], fresh: bool = False) -> Path:
    """The directory of the completed run `headrace run WORDS name=NAME`; runs it unless it is there."""
    directory = ROOT / "runs" / name
    summary = directory / "summary.json"
    if not fresh and summary.exists() and json.loads(summary.read_text())["status"] == "completed":
        return directory
    if directory.exists():
        shutil.rmtree(directory)
    command = [sys.executable, "-m", "headrace.cli.main", "run", *words, f"name={name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return directory


def summary_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


def rows_of(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]
