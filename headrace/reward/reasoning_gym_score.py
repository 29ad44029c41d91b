"""Built-in reward `reasoning_gym`: each data set's own `score_answer`.

`extra_info["reasoning_gym"]` of the row is {"dataset": name, "entry": {"question", "answer", "metadata"}},
as rows of `reasoning_gym:NAME` have it.

`import reasoning_gym` imports all of its data sets, and fails without packages that a few of them need
(pycosat has no wheel). So only the module of the data set that is asked for is imported here: its package
is found, not executed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

if importlib.util.find_spec("reasoning_gym") is None:
    raise ImportError("the package reasoning_gym is not installed: pip install --no-deps reasoning_gym")

_NAMED = re.compile(r'^DATASET_NAME\s*=\s*"(\w+)"|register_dataset\(\s*"(\w+)"', re.MULTILINE)
_OWN_INIT = ("coaching", "data")
"""Subpackages without data sets: the others' modules import from them."""


def _root() -> Path:
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def dataset_modules() -> dict[str, str]:
    """Name of every data set -> its module."""
    root = _root()
    found = {}
    for file in sorted(root.rglob("*.py")):
        if file.parent == root:
            continue
        for match in _NAMED.finditer(file.read_text(encoding="utf-8")):
            module = ".".join(("reasoning_gym", *file.relative_to(root).with_suffix("").parts))
            found[match[1] or match[2]] = module
    return found


def _packages_without_their_imports() -> None:
    """Put reasoning_gym and its categories into sys.modules, unexecuted."""
    if "reasoning_gym" in sys.modules:
        return
    root = _root()
    directories = [d.parent for d in root.glob("*/__init__.py") if d.parent.name not in _OWN_INIT]
    for directory in (root, *directories):
        name = ".".join(("reasoning_gym", *directory.relative_to(root).parts))
        package = types.ModuleType(name)
        package.__path__ = [str(directory)]
        sys.modules[name] = package


@functools.cache
def scoring(dataset: str) -> Callable[[str | None, dict[str, Any]], float]:
    """`score_answer` of the data set. Raises ValueError or ImportError, with what to do."""
    modules = dataset_modules()
    if dataset not in modules:
        raise ValueError(f"reasoning_gym has no data set {dataset!r}")
    _packages_without_their_imports()
    try:
        importlib.import_module(modules[dataset])
        factory = importlib.import_module("reasoning_gym.factory")
        score: Callable[[str | None, dict[str, Any]], float] = factory.get_score_answer_fn(dataset)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"reasoning_gym's data set {dataset} needs the package {error.name}, which is not installed"
        ) from error
    return score


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """What the data set itself says; most give 1 for the right answer and something between for near ones."""
    about = extra_info.get("reasoning_gym")
    if not isinstance(about, dict) or not isinstance(about.get("entry"), dict):
        raise ValueError(
            'the reward reasoning_gym needs extra_info["reasoning_gym"] = {"dataset": name, "entry": '
            '{"question", "answer", "metadata"}}; rows of data.train_files: [reasoning_gym:NAME] have it'
        )
    return float(scoring(str(about.get("dataset")))(solution_str.strip(), about["entry"]))
