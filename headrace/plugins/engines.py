"""Inference engines by name. One of your own comes with an installed package alone.

An engine is a class with the methods of `headrace_rollouter.inference.engine.Engine`, best by inheriting
from it. What it must keep: behaviour log-probs and versions come with each token from the model that sampled
it, a response that was interrupted concatenates, and nothing is generated while weights are half loaded.
"""

from __future__ import annotations

from typing import Any

from headrace.plugins.registry import Registry

SHIPPED = "headrace_rollouter.inference.engine:Engine"


def _engine(found: Any) -> Any:
    wanted = (
        "start",
        "generate",
        "pause",
        "resume",
        "join_group",
        "load",
        "canary",
        "check",
        "shutdown",
        "version",
    )
    missing = [name for name in wanted if not callable(getattr(found, name, None))]
    if missing:
        raise TypeError(f"it has no {', '.join(missing)}; inherit from {SHIPPED.replace(':', '.')}")
    return found


ENGINES: Registry[Any] = Registry(
    "engine",
    {"vllm": SHIPPED},
    group="headrace.engines",
    convert=_engine,
)
