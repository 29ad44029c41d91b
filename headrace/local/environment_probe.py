"""Create an environment in a separate process to check that it loads.

`python -m headrace.local.environment_probe` reads the configuration's section as JSON from stdin, because
other users can see a process's arguments. It exits with 0, or with 1 and the problem in the last line of
stderr. The process is separate because the module is the user's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from headrace.config.environment import EnvironmentConfig
from headrace.config.run import RunConfig
from headrace.environments.loading import EnvironmentFailed, load_environment
from headrace.service.module_command import module_command

_IMPORT_S = 60.0


def problems(config: RunConfig) -> Iterator[str]:
    """Problems with the run's environment; none if it can be created."""
    section = config.environment
    if section.is_single_turn:
        return
    where = f"environment.path: {section.path}" if section.path else f"environment.name: {section.name}"
    try:
        done = subprocess.run(
            module_command("headrace.local.environment_probe"),
            input=section.model_dump_json().encode(),
            capture_output=True,
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"{where}: its import did not end within {_IMPORT_S:.0f} s; make it quicker"
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else f"its import ended the process with code {done.returncode}"
        yield why if why.startswith("environment") else f"{where}: {why}; correct it"


def problem(section: str) -> str | None:
    """What is wrong with the environment, or None."""
    try:
        load_environment(EnvironmentConfig.model_validate_json(section))
    except EnvironmentFailed as error:
        return str(error)
    except BaseException as error:  # a module may also raise KeyboardInterrupt
        return f"environment: making it raised {error!r}"
    return None


if __name__ == "__main__":
    found = problem(sys.stdin.read())
    if found:
        print(found.replace("\n", " "), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1 if found else 0)  # do not wait for threads that the module started
