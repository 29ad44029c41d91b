"""The demo's reward, which misbehaves when it is told to by files in HEADRACE_CHAOS_DIR."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from headrace.demo.reward import compute_score as demo_score

SLOW, RAISES, POISON = "slow", "raises", "poison"
SLOW_S = 0.3
RAISE_SHARE = 0.2


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    flags = Path(os.environ["HEADRACE_CHAOS_DIR"])
    if (flags / SLOW).exists():
        time.sleep(SLOW_S)
    if (flags / RAISES).exists() and random.random() < RAISE_SHARE:
        raise ValueError("told to raise")
    if (flags / POISON).exists() and (extra_info or {}).get("split") != "val":
        _poison(flags / POISON, str(ground_truth))
    return float(demo_score(data_source, solution_str, ground_truth, extra_info))


def _poison(flag: Path, answer: str) -> None:
    """The first prompt that is scored while the flag is empty is the poison: it kills the rollouter."""
    chosen = flag.read_text()
    if not chosen:
        fresh = flag.with_name(f"{POISON}-{os.getpid()}")
        fresh.write_text(answer)
        fresh.replace(flag)
        chosen = answer
    if answer == chosen:
        os.kill(os.getppid(), signal.SIGKILL)  # the rollouter, whose child this process is
