"""The built-in demo tasks, with a model small enough to learn them on two CPU cores.

    spell_backward   spell a word backward: `configs/demo.yaml`
    long_tail        the same, repeated so that a few answers are very long: `configs/long_tail.yaml`
    calculator       calculate with a tool, in two turns: `configs/calculator.yaml`

A configuration names a demo's files by URI, wherever it would name a path:

    demo:spell_backward         the warmed-up model's folder (weights, configuration, tokenizer)
    demo:spell_backward/train   the training rows, JSON lines
    demo:spell_backward/val     the held-out rows, JSON lines

and likewise for the other tasks. The files are made on first use (up to a minute on one thread) and cached.
This module imports neither torch nor transformers, so that resolving a URI that is already cached costs
milliseconds.
"""

from collections.abc import Callable
from pathlib import Path

from headrace.demo.calculator import CALCULATOR
from headrace.demo.long_tail import LONG_TAIL
from headrace.demo.warmup import (
    SPELL_BACKWARD,
    DemoAssets,
    Progress,
    Task,
    held_out_exact_match,
    is_cached,
    prepare,
)

__all__ = [
    "KNOWN_URIS",
    "SCHEME",
    "TASKS",
    "DemoAssets",
    "Progress",
    "Task",
    "held_out_exact_match",
    "is_cached",
    "is_demo_uri",
    "prepare",
    "resolve",
    "task_of",
]

SCHEME = "demo:"

TASKS: dict[str, Task] = {task.name: task for task in (SPELL_BACKWARD, LONG_TAIL, CALCULATOR)}

_FILES: dict[str, Callable[[DemoAssets], Path]] = {
    "": lambda assets: assets.model_dir,
    "/train": lambda assets: assets.train_file,
    "/val": lambda assets: assets.val_file,
}
_ASSETS = {f"{SCHEME}{name}{part}": (task, _FILES[part]) for name, task in TASKS.items() for part in _FILES}
KNOWN_URIS = tuple(_ASSETS)


def is_demo_uri(uri: str) -> bool:
    """Whether `uri` asks for a demo asset rather than naming a path."""
    return uri.startswith(SCHEME)


def task_of(uri: str) -> Task:
    """The task whose asset `uri` names. Raises ValueError when the URI is not one of `KNOWN_URIS`."""
    if uri not in _ASSETS:
        raise ValueError(f"unknown demo asset {uri!r}; the known ones are: {', '.join(KNOWN_URIS)}")
    return _ASSETS[uri][0]


def resolve(uri: str, cache_dir: Path, seed: int, progress: Progress | None = None) -> Path:
    """The path of the asset that `uri` names, preparing the demo under `cache_dir` if it is not cached.

    Raises ValueError, before anything is built, when the URI is not one of `KNOWN_URIS`.
    """
    task = task_of(uri)
    _, select = _ASSETS[uri]
    return select(prepare(cache_dir, seed, progress, task=task))
