"""Sums of two numbers as chat prompts, and their reward: data for a model that knows a chat template.

What this module guarantees:

- The rows depend on the seed alone. No sum is both trained and held out, in either order of its terms.
- The reward is 1 when the last number of the answer is the sum, however the sentence around it reads, and 0
  when it is another, when there is none, or when the answer was cut off: ending it is part of it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DATA_SOURCE = "sums"
ABILITY = "arithmetic"

EXAMPLES: tuple[tuple[int, int], ...] = ((2, 3), (7, 4))
"""Shown as earlier turns of the chat: a small model otherwise talks about the sum rather than give it."""

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")

Sum = tuple[int, int]


def split_sums(
    seed: int, smallest: int, largest: int, train: int, held_out: int
) -> tuple[list[Sum], list[Sum]]:
    """(training sums, held-out sums) with terms from `smallest` to `largest`.

    Raises ValueError when there are fewer different sums than asked for.
    """
    shown = {tuple(sorted(example)) for example in EXAMPLES}
    every = [
        (a, b) for a in range(smallest, largest + 1) for b in range(a, largest + 1) if (a, b) not in shown
    ]
    if train + held_out > len(every):
        raise ValueError(
            f"there are {len(every)} sums of terms from {smallest} to {largest}, fewer than "
            f"{train} + {held_out}: raise the largest term or ask for fewer rows"
        )
    rng = random.Random(seed)
    chosen = rng.sample(every, train + held_out)
    turned = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in chosen]
    return turned[:train], turned[train:]


def data_row(terms: Sum, split: str, index: int) -> dict[str, Any]:
    """One row in verl's format."""
    a, b = terms
    turns = []
    for x, y in EXAMPLES:
        turns += [_turn("user", f"{x} + {y} = ?"), _turn("assistant", f"{x} + {y} = {x + y}")]
    return {
        "prompt": [*turns, _turn("user", f"{a} + {b} = ?")],
        "data_source": DATA_SOURCE,
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_rows(path: Path, sums: Iterable[Sum], split: str) -> None:
    """Write one row a sum to `path`, as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for index, terms in enumerate(sums):
            file.write(json.dumps(data_row(terms, split, index)) + "\n")


def last_number(text: str) -> str | None:
    """The last number in `text`, without thousands separators; None when there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Score one response; verl's signature for a custom reward function."""
    if extra_info is not None and extra_info.get("finish_reason") == "length":
        return 0.0
    number = last_number(solution_str)
    return 1.0 if number is not None and float(number) == float(ground_truth) else 0.0
