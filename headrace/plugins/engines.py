"""Inference engines by name. Custom engines can only come from installed packages.

An engine is a class with the methods of `headrace_rollouter.inference.engine.Engine`, preferably a subclass.
Invariants: each token carries the behaviour log-prob and version of the model that sampled it, the segments
of an interrupted response concatenate, and nothing is generated while weights are partly loaded.
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
        "watch",
        "sequence_s",
        "tokens_in_flight",
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
