"""Text of others on a terminal: it is shown, never obeyed.

Responses of a model, prompts, exceptions and names from a ledger may hold whatever moves a cursor, hides a
line, sets a title or turns the order of letters around. `safe` writes each such character out as `\\u001b`,
which is what JSON writes too: JSON stays JSON with the same meaning. `guard` puts it between this process and
its standard streams, so that no command and no log can forget it.

Standard library only: processes that run users' functions import this.
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
    "\ud800-\udfff"  # halves of a surrogate pair: no terminal's encoding has them
    "]"
)


def safe(text: str) -> str:
    """`text` with control characters written out; tabs and newlines stay."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """The same with newlines written out too, for what stands within a line: it makes up no other one."""
    return safe(text).replace("\n", "\\n")


class Guarded:
    """A text stream on which everything that is written is `safe`. All else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        """For a program's own control sequences."""

    def write(self, text: str) -> int:
        self.raw.write(safe(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def guard() -> None:
    """Let nothing but safe text through to stdout and stderr from now on. More than once is once.

    Libraries' progress bars are off, in what is imported later: they would be shown as the lines they redraw.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def raw(stream: TextIO) -> TextIO:
    """What lies behind a guarded stream: whoever draws on it makes safe what it draws."""
    return stream.raw if isinstance(stream, Guarded) else stream
