"""Built-in reward `math_verify`: 1 if the response's answer is mathematically equal to the ground truth."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score a response. `ground_truth`: an expression or LaTeX, with or without dollar signs.

    A response without a parsable answer scores 0. `pred` is the parsed answer. Raises ValueError when the
    ground truth itself cannot be parsed, which is an error in the data.
    """
    gold = parse(ground_truth)
    if not gold:
        gold = parse(f"${ground_truth}$")
    if not gold:
        raise ValueError(f"math_verify cannot read the ground truth {ground_truth[:200]!r}")
    found = parse(solution_str)
    if not found:
        return {"score": 0.0, "parsed": 0.0, "pred": None}
    return {"score": float(verify(gold, found)), "parsed": 1.0, "pred": str(found[0])}
