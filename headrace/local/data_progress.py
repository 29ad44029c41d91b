"""Progress messages while the data is read."""

from __future__ import annotations

import sys
import time

from headrace.data.rows import Progress

_EVERY_S = 3.0


def print_progress() -> Progress:
    """Return a callback that reports progress on standard error every few seconds."""
    told = time.monotonic()

    def tell(what: str, done: int, total: int | None) -> None:
        nonlocal told
        if time.monotonic() - told > _EVERY_S:
            told = time.monotonic()
            print(f"{what}: {done:,}" + (f" of {total:,}" if total else ""), file=sys.stderr, flush=True)

    return tell
