"""The file of expected numbers: reading it, and comparing with it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FILE = Path(os.environ.get("HEADRACE_VECTORS") or Path(__file__).parents[2] / "data" / "algorithms.json")
DATA: dict[str, Any] = json.loads(FILE.read_text())


class Vectors:
    """The file, and which of its leaves were read as inputs or compared."""

    def __init__(self) -> None:
        self.known: set[tuple[str, ...]] = set()

    def read(self, *path: str) -> Any:
        """An input. A dictionary counts with everything in it."""
        value = lookup(path)
        self.known.update(leaf for leaf in leaves(value, path))
        return value

    def tensor(self, *path: str) -> torch.Tensor:
        return torch.tensor(self.read(*path), dtype=torch.float64)

    def batch(self, name: str) -> torch.Tensor:
        return self.tensor("batch", name)

    def compare(self, actual: Any, *path: str, mask: torch.Tensor | None = None) -> None:
        expected = torch.as_tensor(lookup(path), dtype=torch.float64)
        self.known.add(path)
        got = torch.as_tensor(actual).detach().double()
        assert got.shape == expected.shape, f"{path}: {tuple(got.shape)} != {tuple(expected.shape)}"
        if mask is not None:
            got, expected = got[mask > 0], expected[mask > 0]
        tolerance = 1e-5 if path[0] == "areal" else 1e-6
        torch.testing.assert_close(
            got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{'/'.join(path)}: {text}"
        )


def lookup(path: tuple[str, ...]) -> Any:
    value: Any = DATA
    for key in path:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, str(index)))
    else:
        yield path


def group_ids(labels: list[str]) -> torch.Tensor:
    return torch.tensor([sorted(set(labels)).index(label) for label in labels])


def gradient(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, x, allow_unused=True)
    return torch.zeros_like(x) if grad is None else grad


def number(pattern: str, text: str, default: float) -> float:
    found = re.search(pattern, text)
    return float(found[1]) if found else default


def compare_correction_metric(v: Vectors, ours: dict[str, torch.Tensor], *path: str) -> None:
    v.compare(ours[path[-1].removeprefix("rollout_corr/")], *path)
