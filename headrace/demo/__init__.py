"""The built-in demo task: spell a word backward, with a model small enough to learn it on two CPU cores.

A configuration names the demo's files by URI, wherever it would name a path:

    demo:spell_backward         the warmed-up model's folder (weights, configuration, tokenizer)
    demo:spell_backward/train   the training rows, JSON lines
    demo:spell_backward/val     the held-out rows, JSON lines

The files are made on first use (about 40 seconds on one thread) and cached. This module imports neither
torch nor transformers, so that resolving a URI that is already cached costs milliseconds.
"""

from collections.abc import Callable
from pathlib import Path

from headrace.demo.warmup import DemoAssets, Progress, held_out_exact_match, is_cached, prepare

__all__ = [
    "KNOWN_URIS",
    "SCHEME",
    "DemoAssets",
    "Progress",
    "held_out_exact_match",
    "is_cached",
    "is_demo_uri",
    "prepare",
    "resolve",
]

SCHEME = "demo:"

_ASSETS: dict[str, Callable[[DemoAssets], Path]] = {
    "demo:spell_backward": lambda assets: assets.model_dir,
    "demo:spell_backward/train": lambda assets: assets.train_file,
    "demo:spell_backward/val": lambda assets: assets.val_file,
}
KNOWN_URIS = tuple(_ASSETS)


def is_demo_uri(uri: str) -> bool:
    """Whether `uri` asks for a demo asset rather than naming a path."""
    return uri.startswith(SCHEME)


def resolve(uri: str, cache_dir: Path, seed: int, progress: Progress | None = None) -> Path:
    """The path of the asset that `uri` names, preparing the demo under `cache_dir` if it is not cached.

    Raises ValueError, before anything is built, when the URI is not one of `KNOWN_URIS`.
    """
    select = _ASSETS.get(uri)
    if select is None:
        raise ValueError(f"unknown demo asset {uri!r}; the known ones are: {', '.join(KNOWN_URIS)}")
    return select(prepare(cache_dir, seed, progress))
