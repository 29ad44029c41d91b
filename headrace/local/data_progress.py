"""How far the reading of the data is, for people who wait for it."""

from __future__ import annotations

import sys
import time

from headrace.data.rows import Progress

_EVERY_S = 3.0


def print_progress() -> Progress:
    """Tells on standard error what takes longer than a few seconds."""
    told = time.monotonic()

    def tell(what: str, done: int, total: int | None) -> None:
        nonlocal told
        if time.monotonic() - told > _EVERY_S:
            told = time.monotonic()
            print(f"{what}: {done:,}" + (f" of {total:,}" if total else ""), file=sys.stderr, flush=True)

    return tell
