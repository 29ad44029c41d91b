"""The calculator demo on real parts, shortened: a tiny model finds out that the tool pays."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from headrace.metrics.row_keys import ENVIRONMENT, SYNC, TELEMETRY, TOOLS, problems
from tests.support.run_process import HEADRACE, ROOT, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

UPDATES = 20


def test_a_tiny_model_learns_to_call_the_calculator(tmp_path: Path) -> None:
    """Greedy it guesses at first, and is wrong; soon it calls the tool and repeats the result."""
    run = Run(tmp_path / "calculator", [])
    words = [f"runs_dir={tmp_path}", f"rollout.total_rollout_steps={UPDATES * 16}", "rollout.replicas=1"]
    done = subprocess.run(
        [*HEADRACE, "run", "configs/calculator.yaml", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    rows = run.rows()
    assert len(rows) == UPDATES
    keys = {key for row in rows for key in row}
    assert problems(keys, {SYNC, TELEMETRY, ENVIRONMENT, TOOLS, "in the last row of a window"}) == []

    scores = [json.loads(line) for line in (run.directory / "eval.jsonl").read_text().splitlines()]
    by_version = {s["version"]: s["reward"] for s in scores if not s["unfinished"]}
    before, after = by_version[0], by_version[max(by_version)]
    told = f"held-out score by version: {by_version}"
    print(told)
    assert before < 0.1, told
    assert after > before + 0.5, told

    for row in rows:
        assert 1.0 <= row["env/turns/mean"] <= row["env/turns/max"] <= 4
        assert row["env/tool_errors/mean"] <= row["env/tool_calls/mean"]
        # Tokens that are trained are fewer than those that take room: the results are read only.
        assert row["response_length/max"] <= 32
    calls = [row["env/tool_calls/mean"] for row in rows]
    assert sum(calls[-5:]) / 5 > sum(calls[:5]) / 5 + 0.2, calls
    trained = rows[-1]["trained_tokens"]
    room = sum(row["response_length/mean"] * 16 * 8 for row in rows)
    assert trained < 0.95 * room, "the environment's tokens count as room, and not as trained"
