"""Import the user's algorithms and plugins in a separate process and check the configuration against them.

`python -m headrace.local.plugin_probe` reads the configuration as JSON from stdin, because other users can
see a process's arguments. It exits with 0, or with 1 and one problem per line after the last `MARK` in
stderr. The process is separate because the code is not ours. Rewards and environments have their own probes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from headrace.algorithms.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from headrace.config.algorithm_checks import AlgorithmError, load_algorithms
from headrace.config.problems import cross_field_problems
from headrace.config.run import RunConfig
from headrace.data.sources import DATA_SOURCES, is_source, name_of
from headrace.plugins.engines import ENGINES
from headrace.plugins.optimizers import OPTIMIZERS
from headrace.plugins.registry import Registry
from headrace.plugins.trackers import TRACKERS
from headrace.plugins.transports import TRANSPORTS
from headrace.plugins.user_code import UserCodeError
from headrace.records.trackers import wanted
from headrace.service.module_command import module_command

_IMPORT_S = 120.0
MARK = "headrace: plugins:"


def problems(config: RunConfig) -> Iterator[str]:
    """Problems with code from outside the project. If all code is ours, no process is started."""
    shipped = all(registry.origin(name) == "headrace" for _, name, registry in _named(config))
    if shipped and not config.algorithm.modules:
        return
    where = "algorithm.modules" if config.algorithm.modules else "plugins"
    try:
        done = subprocess.run(
            module_command("headrace.local.plugin_probe"),
            input=json.dumps(config.to_plain()).encode(),
            capture_output=True,
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"{where}: their import did not end within {_IMPORT_S:.0f} s; make it quicker"
        return
    if not done.returncode:
        return
    said = done.stderr.decode(errors="replace")
    found = said.rpartition(MARK)[2].strip().splitlines() if MARK in said else []
    ending = f"{where}: their import ended the process with code {done.returncode}; correct it"
    yield from found or [ending]


def _named(config: RunConfig) -> Iterator[tuple[str, str, Registry[Any]]]:
    yield "sync.transport", config.sync.transport, TRANSPORTS
    yield "rollout.name", config.rollout.name, ENGINES
    yield "actor.optim.optimizer", config.actor.optim.optimizer, OPTIMIZERS
    yield "critic.optim.optimizer", config.critic.optim.optimizer, OPTIMIZERS
    yield "algorithm.adv_estimator", config.algorithm.adv_estimator, ADVANTAGE_ESTIMATORS
    yield "actor.policy_loss", config.actor.policy_loss, POLICY_LOSSES
    yield from (("trainer.logger", name, TRACKERS) for name in wanted(config))
    for entry in (*config.data.train_paths, *config.data.val_files):
        if is_source(entry) and (name := name_of(entry)) is not None:
            yield "data", name, DATA_SOURCES


def _found(text: str) -> list[str]:
    config, at = RunConfig.model_validate_json(text), "algorithm.modules"
    try:
        load_algorithms(config)
        for key, name, registry in _named(config):
            at = key
            if registry.origin(name) != "headrace":
                registry.get(name)
        return cross_field_problems(config)  # loading registered what the algorithms need
    except AlgorithmError as error:
        return error.lines
    except UserCodeError as error:
        return [f"{at}: {error}"]
    except BaseException as error:  # a module may also raise KeyboardInterrupt
        return [f"{at}: importing it raised {error!r}; correct it"]


if __name__ == "__main__":
    lines = [line.replace("\n", " ") for line in _found(sys.stdin.read())]
    if lines:
        print(MARK, *lines, sep="\n", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1 if lines else 0)  # do not wait for threads that the modules started
