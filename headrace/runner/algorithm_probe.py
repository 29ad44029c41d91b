"""Import the algorithms of the user in a process of its own, to see whether the configuration fits them.

`python -m headrace.runner.algorithm_probe` reads the configuration as JSON from stdin (arguments of a process
are there for all to see) and exits 0, or 1 with the problems, a line each, after the last `MARK` in stderr. A
process of its own because the modules are the user's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from headrace.algorithms.checks import AlgorithmError, estimator_of, load_algorithms, loss_of
from headrace.config import RunConfig

_IMPORT_S = 120.0
MARK = "headrace: algorithms:"


def problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with algorithms from outside the project; nothing is started where all are shipped."""
    shipped = estimator_of(config) is not None and loss_of(config) is not None
    if shipped and not config.algorithm.modules:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headrace.runner.algorithm_probe"],
            input=json.dumps(config.to_plain()).encode(),
            capture_output=True,
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"algorithm.modules: their import did not end within {_IMPORT_S:.0f} s; make it quicker"
        return
    if not done.returncode:
        return
    said = done.stderr.decode(errors="replace")
    found = said.rpartition(MARK)[2].strip().splitlines() if MARK in said else []
    ending = f"algorithm.modules: their import ended the process with code {done.returncode}; correct it"
    yield from found or [ending]


def _found(text: str) -> list[str]:
    try:
        load_algorithms(RunConfig.model_validate_json(text))
    except AlgorithmError as error:
        return error.lines
    except BaseException as error:  # a module may also raise KeyboardInterrupt
        return [f"algorithm.modules: importing them raised {error!r}"]
    return []


if __name__ == "__main__":
    lines = [line.replace("\n", " ") for line in _found(sys.stdin.read())]
    if lines:
        print(MARK, *lines, sep="\n", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1 if lines else 0)  # not held up by threads that the modules started
