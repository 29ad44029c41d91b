"""Built-in reward `reasoning_gym`: each data set's own `score_answer`.

The row's `extra_info["reasoning_gym"]` is {"dataset": name, "entry": {"question", "answer", "metadata"}}, as
in rows of `reasoning_gym:NAME`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from headrace.data.gym_package import ADVICE, MissingPackage, absent_packages, import_reasoning_gym

try:
    reasoning_gym = import_reasoning_gym()
except ModuleNotFoundError as error:
    raise ImportError(f"the package reasoning_gym is not installed; {ADVICE}") from error


@functools.cache
def scoring(dataset: str) -> Callable[[str | None, dict[str, Any]], float]:
    """The data set's `score_answer`. Raises ValueError or ImportError with a message that says what to do."""
    known = reasoning_gym.factory.DATASETS
    if dataset not in known:
        raise ValueError(f"reasoning_gym has no data set {dataset!r}")
    absent = absent_packages(known[dataset][0].__module__)
    if absent:
        raise ImportError(
            f"reasoning_gym's data set {dataset} needs the package {absent[0]}, which is not installed"
        )
    try:
        score: Callable[[str | None, dict[str, Any]], float]
        score = reasoning_gym.factory.get_score_answer_fn(dataset)
    except MissingPackage as error:
        raise ImportError(f"reasoning_gym's data set {dataset}: {error}") from error
    return score


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """Score with the data set's own function. Most give 1 if right and partial credit for near misses."""
    about = extra_info.get("reasoning_gym")
    if not isinstance(about, dict) or not isinstance(about.get("entry"), dict):
        raise ValueError(
            'the reward reasoning_gym needs extra_info["reasoning_gym"] = {"dataset": name, "entry": '
            '{"question", "answer", "metadata"}}; rows of data.train_files: [reasoning_gym:NAME] have it'
        )
    return float(scoring(str(about.get("dataset")))(solution_str.strip(), about["entry"]))
