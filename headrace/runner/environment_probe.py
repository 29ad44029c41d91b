"""Make an environment in a process of its own, to see whether it loads.

`python -m headrace.runner.environment_probe` reads the configuration's section as JSON from stdin (arguments
of a process are there for all to see) and exits 0, or 1 with the problem in the last line of stderr. A
process of its own because the module is the user's.
"""

from __future__ import annotations

import os
import sys

from headrace.config_env import EnvironmentConfig
from headrace.environments.loading import EnvironmentFailed, load_environment


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
    os._exit(1 if found else 0)  # not held up by threads that the module started
