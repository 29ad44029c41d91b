"""Built-in reward `math_verify`: 1 when the response's answer equals the ground truth, as mathematics."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """`ground_truth`: an expression or LaTeX, with or without dollar signs.

    A response without an answer that can be read is worth 0. The answer as it was read is `pred`.
    Raises ValueError when the ground truth itself cannot be read: that is the data's fault.
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
