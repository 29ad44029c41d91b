"""Text and SHA-1 of each Lua script: the shared helpers, the checks that the run exists and has not gone back
from what the caller has seen, the transition, and the answer, which shows the caller how far the ledger is.

A script begins with `accept(...)`, which declares its arguments and checks them before anything else is done
(`lua/_accept.lua`); one that does not is not assembled.

Each script says in its first line whether it may run when the server's memory is used up. Those that bring
bytes in may not, and are refused before their first write (without that line the server would refuse the
first write that needs memory, in the middle). All others may: they are what makes room.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources


@functools.cache
def _file(name: str) -> str:
    return (resources.files("headrace.ledger") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


REFUSED = "HEADRACE refused: "
"""So begins the answer to arguments that no script takes."""

WITHOUT_A_RUN = ("configure", "audit")
"""May run where there is no run: one makes it, the other says what is left of it."""
BRINGS_BYTES = ("issue", "finish", "park", "val_load", "val_finish")


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
    """All scripts, without the shared parts."""
    files = (resources.files("headrace.ledger") / "lua").iterdir()
    return sorted(f.name[:-4] for f in files if f.name.endswith(".lua") and not f.name.startswith("_"))
