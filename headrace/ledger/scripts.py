"""Text and SHA-1 of each Lua script: the shared helpers, the check that the run exists, the transition."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources


@functools.cache
def _file(name: str) -> str:
    return (resources.files("headrace.ledger") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


@functools.cache
def source(name: str) -> str:
    parts = [_file("_common")]
    if name != "configure":
        parts.append(_file("_configured"))
    return "\n".join([*parts, _file(name)])


@functools.cache
def sha(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def names() -> list[str]:
    """All scripts, without the shared parts."""
    files = (resources.files("headrace.ledger") / "lua").iterdir()
    return sorted(f.name[:-4] for f in files if f.name.endswith(".lua") and not f.name.startswith("_"))
