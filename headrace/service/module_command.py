"""How one process of ours starts another: `python -P -m MODULE`.

`-m` alone puts the working directory first on the path: a folder called `headrace` there (that of a clone,
say), a `queue.py` or a `json.py` of somebody's would be imported in place of what is installed. A user's
file is given by its path; a user's module is installed, or found by PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_SAFE_PATH = "PYTHONSAFEPATH"


@contextlib.contextmanager
def safe_path_for_children() -> Iterator[None]:
    """The same for what a library starts meanwhile by a command of its own, and what that starts.

    Not for longer: what a user's code starts finds its own modules as it always does.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def module_command(module: str, *words: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *words]
