"""The command that starts another process of ours: `python -P -m MODULE`.

`-m` alone puts the working directory first on the path. A folder called `headrace` there (a clone, say), or
a user's `queue.py` or `json.py`, would be imported instead of the installed module. Users name a file by its
path; a user's module must be installed or be on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_SAFE_PATH = "PYTHONSAFEPATH"


@contextlib.contextmanager
def safe_path_for_children() -> Iterator[None]:
    """Apply the same rule to processes that a library starts inside this context, and to their children.

    It ends with the context, so that processes started by user code find their own modules as usual.
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
