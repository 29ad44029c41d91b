"""Text and SHA-1 of each Lua script.

A script is assembled from the shared helpers, the checks that the run exists and is not behind what the
caller has seen, the transition itself, and the answer, which tells the caller how far the ledger is.

Every transition begins with `accept(...)`, which declares its arguments and checks them before anything else
(`lua/_accept.lua`). One that does not is not assembled.

The first line of a script says whether it may run when the server is out of memory. Scripts that add bytes
may not, and are refused before their first write; without that line the server would fail them halfway, at
the first write that needs memory. All others may run, because they free memory.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources


@functools.cache
def _file(name: str) -> str:
    return (resources.files("headrace.ledger") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


REFUSED = "HEADRACE refused: "
"""Prefix of the error for invalid arguments."""

WITHOUT_A_RUN = ("configure", "audit")
"""May run where the run does not exist: one creates it, the other reports what is left of it."""
BRINGS_BYTES = ("issue", "finish", "park", "val_load", "val_finish")
"""Refused when the server is out of memory."""


@functools.cache
def source(name: str) -> str:
    flags = "" if name in BRINGS_BYTES else " flags=allow-oom"
    body = _file(name)
    if not body.startswith("accept("):
        raise ValueError(f"{name}.lua does not begin with accept(...), which declares its arguments")
    parts = [f"#!lua{flags}", *map(_file, ("_common", "_accept", "_marks")), "local function operation()"]
    if name not in WITHOUT_A_RUN:
        parts.append(_file("_configured"))
    return "\n".join([*parts, body, "end", _file("_answer")])


@functools.cache
def sha(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def names() -> list[str]:
    """The names of all transitions, without the shared parts."""
    files = (resources.files("headrace.ledger") / "lua").iterdir()
    return sorted(f.name[:-4] for f in files if f.name.endswith(".lua") and not f.name.startswith("_"))
