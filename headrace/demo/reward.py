"""The reward of the demos: 1 for the exact answer, 0 for anything else.

Exact match on purpose. A graded score (shared letters, edit distance) starts at 0.6 to 0.75 for a model that
has only learnt to copy the word, which leaves little to learn and a poor signal to learn it from.
"""

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Score one response; verl's signature for a custom reward function.

    data_source: the row's data source; not used, the demos' tasks are all scored alike.
    solution_str: the response's text, special tokens removed.
    ground_truth: the right answer, such as the word spelt backward.
    extra_info: the row's extra information. Its "finish_reason", where present, says how the generation
        ended: at "length" the response ran into the token limit without <eos> and scores 0 even if the
        letters are right, because ending the answer is part of it.
    """
    if extra_info is not None and extra_info.get("finish_reason") == "length":
        return 0.0
    return 1.0 if solution_str.strip() == ground_truth.strip() else 0.0
