"""Whether a shipped tracker's package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator


def missing(package: str) -> Iterator[str]:
    """The problem, if it is not installed. A mere directory of that name in the working directory is no
    package: Weights & Biases leaves one."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        yield (
            f"trainer.logger: {package} is not installed; run pip install -e '.[logging]' in the checkout, "
            "or leave it out"
        )
