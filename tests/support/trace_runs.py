"""Runs with a timeline, for the tests of recording and of merging."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.traces.reading import TraceEvent, read

S = 10**9


def run_directory(tmp_path: Path) -> Path:
    """A run's directory, as `headrace` knows one."""
    root = tmp_path / "runs" / "r"
    root.mkdir(parents=True)
    (root / "config.yaml").write_text("name: r\n")
    return root


def trace_file(run: Path, process: str) -> Path:
    return run / "trace" / f"{process}-{os.getpid()}.jsonl"


def command(run: Path, *arguments: str) -> int:
    """`headrace trace r`; the exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["trace", run.name, "--runs-dir", str(run.parent), *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def slices(run: Path) -> list[TraceEvent]:
    return [e for s in read(run).starts for e in s.events if e.ph == "X"]
