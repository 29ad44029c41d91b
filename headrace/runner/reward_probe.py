"""Import a reward function in a process of its own, to see whether it loads.

`python -m headrace.runner.reward_probe PATH NAME` exits 0, or 1 with the problem in the last line of
stderr. A process of its own because the module is the user's: it may print, exit, start threads or crash.
"""

from __future__ import annotations

import os
import sys

from headrace.reward import RewardError, load_reward


def is_file(path: str) -> bool:
    """Whether `path` means a Python file rather than an importable module."""
    return path.endswith(".py")


def problem(path: str, name: str) -> str | None:
    """What is wrong with the function `name` in `path`, or None."""
    try:
        load_reward(path, name)
    except RewardError as error:
        cause = error.__cause__
        return f"{error}{_line_in(cause, path) if cause is not None else ''}"
    except BaseException as error:  # a module may also raise SystemExit
        return f"its import raised {error!r}"
    return None


def _line_in(error: BaseException, path: str) -> str:
    """Where in the user's file the import failed."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        if os.path.realpath(trace.tb_frame.f_code.co_filename) == os.path.realpath(path):
            found = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


if __name__ == "__main__":
    found = problem(sys.argv[1], sys.argv[2])
    if found:
        print(found.replace("\n", " "), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1 if found else 0)  # not held up by threads that the module started
