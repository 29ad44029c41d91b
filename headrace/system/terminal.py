"""Untrusted text on a terminal is displayed, never interpreted.

A model's responses, prompts, exceptions and names from a ledger may contain sequences that move the cursor,
hide a line, set a title or reverse the text direction. `safe` escapes each such character, as in `\\u001b`.
JSON uses the same escapes, so JSON keeps its meaning. `guard` wraps the process's standard streams with it,
so that no command and no log can forget it.

Standard library only, because processes that run user functions import this.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, TextIO

_OBEYED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f"  # C0 without tab and newline
    "\x7f-\x9f"  # DEL and C1, which some terminals take for escape sequences
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks, embeddings, overrides, isolates
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # lone surrogates: no terminal encoding has them
    "]"
)


def safe(text: str) -> str:
    """Escape control characters in `text`, except tabs and newlines."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Like `safe`, but escape newlines too, so that text within a line cannot fake another line."""
    return safe(text).replace("\n", "\\n")


class Guarded:
    """A text stream that makes everything written to it `safe` and otherwise delegates to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        """The wrapped stream, for a program's own control sequences."""

    def write(self, text: str) -> int:
        self.raw.write(safe(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def guard() -> None:
    """Let only safe text through to stdout and stderr from now on. Idempotent.

    Also turns off progress bars of libraries imported later: their redrawing would be escaped and shown.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def raw(stream: TextIO) -> TextIO:
    """Return the stream behind a guarded one. The caller must make text safe itself."""
    return stream.raw if isinstance(stream, Guarded) else stream
