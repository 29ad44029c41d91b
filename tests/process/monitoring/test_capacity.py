"""The page on operations says how much memory Redis needs; the code is held to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from headrace.config.redis_memory import largest_sample_bytes, needed_bytes
from headrace.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[3]
MEBI = 2**20
LENGTHS = (1024, 8192, 32768)
THRESHOLDS = (0.0, 0.5, 1.0)


def recipe(length: int, threshold: float) -> RunConfig:
    demo: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    changes: dict[str, Any] = {
        "model": {"path": demo["model"]["path"]},
        "data": {**demo["data"], "max_prompt_length": 2048, "max_response_length": length},
        "rollout": {"n": 16, "total_rollout_steps": 51200},
        "actor": {"ppo_mini_batch_size": 32, "ppo_max_token_len_per_gpu": 65536},
        "async_training": {
            "require_batches": 4,
            "trigger_parameter_sync_step": 4,
            "staleness_threshold": threshold,
        },
        "trainer": {"save_freq": 5},
    }
    return RunConfig.model_validate(demo | changes)


def line(length: int) -> str:
    """One row of the table."""
    sample = largest_sample_bytes(recipe(length, 0.0)) / MEBI
    sums = (f"{needed_bytes(recipe(length, eta)) / MEBI:,.0f} MiB" for eta in THRESHOLDS)
    return f"| {length:,} | {sample:.2f} MiB | {' | '.join(sums)} |"


def test_the_table_says_what_a_run_is_held_to() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.split("## How much memory Redis needs")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [0-9].*$", section, re.MULTILINE)
    assert rows == [line(length) for length in LENGTHS]
