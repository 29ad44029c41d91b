"""One run of a benchmark, in a separate process. Finished runs are reused."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config import loading
from headrace.records.layout import RunLayout

ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 3600.0


def slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def finished_run(name: str, words: Sequence[str], fresh: bool = False, show: bool = False) -> Path:
    """The directory of the completed run `headrace run WORDS name=NAME`; runs it unless it is there.

    One of another configuration is not it; one of older code is, which is what `fresh` is for. `show` lets
    the progress through. Ends the benchmark when the run fails or takes longer than an hour.
    """
    directory = ROOT / "runs" / name
    if not fresh and _is_finished(RunLayout(directory), [*words, f"name={name}"]):
        return directory
    if directory.exists():
        shutil.rmtree(directory)
    command = [sys.executable, "-P", "-m", "headrace.cli.main", "run", *words, f"name={name}"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=not show, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(command)}\nis not done after {_LIMIT_S:g} s")
    if done.returncode:
        said = "" if show else done.stdout[-3000:] + done.stderr[-3000:]
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{said}")
    return directory


def _is_finished(layout: RunLayout, words: Sequence[str]) -> bool:
    if not (layout.requested.exists() and layout.summary.exists()):
        return False
    files = [str(ROOT / w) if loading.is_file_name(w) else w for w in words]
    try:
        wanted, stored = (
            config.model_copy(update={"runs_dir": layout.root.parent})  # in which folder it ran is no matter
            for config in (loading.load(Path(files[0]), files[1:]), loading.load(layout.requested))
        )
    except loading.ConfigError:
        return False  # an old run may have keys that are gone; what is wrong with WORDS, the run will say
    return stored == wanted and summary_of(layout.root)["status"] == "completed"


def summary_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


def rows_of(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def grouped(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Results by name, in the order in which the names first come."""
    out: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        out.setdefault(r["name"], []).append(r)
    return out


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean, and the smallest to the largest."""
    mean, low, high = (f"{v:.{digits}f}" for v in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"
