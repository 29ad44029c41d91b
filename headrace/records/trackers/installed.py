"""Check whether the package of a built-in tracker is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator


def missing(package: str) -> Iterator[str]:
    """The problem, if the package is not installed.

    A plain directory of that name in the working directory does not count: Weights & Biases leaves one.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        yield (
            f"trainer.logger: {package} is not installed; run pip install -e '.[logging]' in the checkout, "
            "or leave it out"
        )
